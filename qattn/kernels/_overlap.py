"""The compiled loop of `overlap.py`: attention between Gaussians in space, over the parts of tiles that matter.

A Gaussian is nine numbers: a mean, times √(½ log₂ e), and the upper triangle of a covariance. With C the sum of two
covariances, its largest eigenvalue is at most the sum of theirs, and det(C)^⅓ at least the sum of theirs (Minkowski):
so boxes about means, the largest *spread* and the least *size* det^⅓ in them bound every weight between two sets.
"""

# mypy: disable-error-code="no-untyped-def"

import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from qattn import tiling
from qattn._compiled import compiled
from qattn.attention import _near, _simd, native
from qattn.attention._near import box_gap, box_span
from qattn.attention._simd import (
    ROWS,
    add,
    add_rows,
    divide,
    exp2,
    lanes,
    load,
    maximum,
    multiply,
    multiply_add,
    multiply_add_rows,
    root,
    splat,
    store,
    subtract,
    zero_rows,
)
from qattn.tiling import PART, TILE

__all__ = ["Cutoff", "Nodes", "add_gradients", "attend_gaussians", "list_near_gaussians"]

PARTS = TILE // PART
_NUMBERS = 9  # of a Gaussian
_LEAST = 0.5  # eigenvalue of a sum of covariances, 1 but for the rounding of covariances that are long and thin
_SHARES = 12  # log₂ of the most tiles among which the tolerance is shared out


class Nodes(NamedTuple):
    """Sets of Gaussians: boxes (low, high) about their means, and what bounds their covariances."""

    boxes: np.ndarray  # (…, 6)
    spread: np.ndarray  # (…,) the largest eigenvalue
    size: np.ndarray  # (…,) the least det^⅓


class Cutoff(NamedTuple):
    """What decides which Gaussians are near; logarithms are in base 2."""

    tol: float  # of the fraction of a row's sum that may be left out
    has_determinant: bool  # whether weights are divided by √det C
    floors: np.ndarray  # (tiles of queries,) a known floor under their sums
    queries: Nodes  # (clouds, nodes), tiles first
    query_parts: Nodes
    keys: Nodes  # (clouds, nodes)
    key_parts: Nodes
    tops: np.ndarray  # (clouds, nodes) log₂ Σ 2^β of the keys, or of what they count for by their values
    part_tops: np.ndarray
    sums: np.ndarray  # (clouds, nodes) log₂ Σ 2^β of the keys
    starts: np.ndarray  # (levels + 1,) where the levels begin among the nodes
    query_tiles: int  # of each cloud


@njit(forceinline=True)
def _most(top, gap, spread, size, has_determinant):
    """log₂ of the most that keys can add, `gap` apart squared."""
    return top - gap / spread - (1.5 * math.log2(size) if has_determinant else 0.0)


@njit
def _near_tiles(tile, cutoff, found, most):
    """Writes the key tiles that matter to a query tile to `found`, and the most that each can add to `most`.

    Returns their count, and log₂ of a weight that is too little to matter.
    """
    cloud = tile // cutoff.query_tiles
    box = tile - cloud * cutoff.query_tiles
    boxes, nodes, starts = cutoff.queries.boxes[cloud], cutoff.keys.boxes[cloud], cutoff.starts
    spread, size = cutoff.queries.spread[cloud, box], cutoff.queries.size[cloud, box]
    floor = cutoff.floors[tile]
    count = 0
    stack = np.empty((2 * len(starts), 2), np.int64)
    stack[0, 0], stack[0, 1] = len(starts) - 2, 0  # a level and a number in it
    height = 1
    while height > 0:
        height -= 1
        level, i = stack[height, 0], stack[height, 1]
        node = starts[level] + i
        top, apart = cutoff.tops[cloud, node], box_gap(boxes, box, nodes, node)
        widest = spread + cutoff.keys.spread[cloud, node]
        high = _most(top, apart, widest, size + cutoff.keys.size[cloud, node], cutoff.has_determinant)
        if not high > floor + cutoff.tol - _SHARES:
            continue
        # No covariance is less than the least, and no determinant more than that of the widest.
        span, own = box_span(boxes, box, nodes, node), cutoff.sums[cloud, node]
        floor = max(floor, _most(own, span, _LEAST, widest, cutoff.has_determinant))
        if level == 0:
            found[count], most[count] = cloud * starts[1] + i, high
            count += 1
            continue
        first = 2 * i
        for child in range(first, min(first + 2, starts[level] - starts[level - 1])):
            stack[height, 0], stack[height, 1] = level - 1, child
            height += 1

    if count == 0:
        return 0, floor
    share = floor + cutoff.tol - min(math.log2(count), _SHARES)
    kept = 0
    for n in range(count):
        if most[n] > share:
            found[kept], most[kept] = found[n], most[n]
            kept += 1
    return kept, share


@njit(forceinline=True)
def _eliminated(query, i, keys, t, j):
    """L⁻¹δ, D⁻¹ and L of C = L D Lᵀ and δ = x_j − x_i, for one register of keys of the tile t.

    Elimination loses as many digits as C is longer than wide, where cofactors would lose twice as many.
    """
    first = t * _NUMBERS * TILE + j
    x = subtract(load(keys, first), splat(query[i, 0]))
    y = subtract(load(keys, first + TILE), splat(query[i, 1]))
    z = subtract(load(keys, first + 2 * TILE), splat(query[i, 2]))
    a = add(load(keys, first + 3 * TILE), splat(query[i, 3]))
    b = add(load(keys, first + 4 * TILE), splat(query[i, 4]))
    c = add(load(keys, first + 5 * TILE), splat(query[i, 5]))
    d = add(load(keys, first + 6 * TILE), splat(query[i, 6]))
    e = add(load(keys, first + 7 * TILE), splat(query[i, 7]))
    f = add(load(keys, first + 8 * TILE), splat(query[i, 8]))
    # C = (a b c; b d e; c e f), L = (1; l 1; m n 1), and 1 / D = p, q, r.
    one = splat(query.dtype.type(1))
    p = divide(one, a)
    l, m = multiply(b, p), multiply(c, p)  # noqa: E741
    q = divide(one, subtract(d, multiply(l, b)))
    e = subtract(e, multiply(l, c))
    n = multiply(e, q)
    r = divide(one, subtract(subtract(f, multiply(m, c)), multiply(n, e)))
    y = subtract(y, multiply(l, x))
    z = subtract(subtract(z, multiply(m, x)), multiply(n, y))
    return (x, y, z), (p, q, r), (l, m, n)


@njit(forceinline=True)
def _exponent(beta, offset, apart, pivots):
    """β_j − δᵀ C⁻¹ δ for one register of keys."""
    x, y, z = apart
    p, q, r = pivots
    form = multiply_add(multiply(x, x), p, multiply_add(multiply(y, y), q, multiply(multiply(z, z), r)))
    return subtract(load(beta, offset), form)


@njit(forceinline=True)
def _weight(beta, offset, shift, apart, pivots, has_determinant):
    """2^(β_j − shift_i − δᵀ C⁻¹ δ) / √det C."""
    weight = exp2(subtract(_exponent(beta, offset, apart, pivots), splat(shift)))
    if has_determinant:
        p, q, r = pivots
        weight = multiply(weight, root(multiply(multiply(p, q), r)))
    return weight


@njit(forceinline=True)
def _add_part(query, first, shift, keys, beta, values, t, begin, has_determinant, sums, out, weights):
    """Adds the weights of a part of the tile t to ROWS rows of sums, and its weighted values to those of out."""
    width, channels = lanes(sums), values.shape[2]
    for r in range(ROWS):
        i = first + r
        total = load(sums, i * width)
        for j in range(begin, begin + PART, width):
            apart, pivots, _ = _eliminated(query, i, keys, t, j)
            weight = _weight(beta, t * TILE + j, shift[i], apart, pivots, has_determinant)
            total = add(total, weight)
            store(weights, r * PART + j - begin, weight)
        store(sums, i * width, total)
    for c in range(0, channels, width):
        product = zero_rows(out)
        for j in range(PART):
            value = load(values, (t * TILE + begin + j) * channels + c)
            product = multiply_add_rows(product, weights, j, PART, value)
        add_rows(out, first * channels + c, channels, product)


@njit
def _near_parts(row, tiles, cutoff, least, near):
    """Writes the numbers of the parts of some tiles that matter to a part of the queries to `near`; their count."""
    rows, others = cutoff.query_parts, cutoff.key_parts
    count = 0
    for t in tiles:
        for part in range(t * PARTS, (t + 1) * PARTS):
            gap = box_gap(rows.boxes, row, others.boxes, part)
            spread, size = rows.spread[row] + others.spread[part], rows.size[row] + others.size[part]
            near[count] = part
            count += _most(cutoff.part_tops[part], gap, spread, size, cutoff.has_determinant) > least
    return count


@njit
def _add_tiles(query, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, out, weights):
    """The parts of a list of tiles that have more than `least`, from zero; by parts of the queries."""
    sums[:] = 0
    out[:] = 0
    for p in range(PARTS):
        for n in range(_near_parts(tile * PARTS + p, tiles, cutoff, least, near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            for first in range(p * PART, (p + 1) * PART, ROWS):
                _add_part(query, first, shift, keys, beta, values, t, begin, cutoff.has_determinant, sums, out, weights)


@njit(forceinline=True)
def _add_gradients(query, i, shift, rows, keys, beta, columns, t, begin, has_determinant, sums):
    """Adds those of a part of the tile t to the ten sums of a row, lane by lane; see `add_gradients`."""
    width, channels = lanes(sums), columns.shape[1]
    minus_half = splat(query.dtype.type(-0.5))
    for j in range(begin, begin + PART, width):
        apart, pivots, factors = _eliminated(query, i, keys, t, j)
        weight = _weight(beta, t * TILE + j, shift[i], apart, pivots, has_determinant)
        factor = splat(query.dtype.type(0))
        for c in range(channels):
            factor = multiply_add(splat(rows[i, c]), load(columns, (t * channels + c) * TILE + j), factor)
        weight = multiply(weight, factor)
        (x, y, z), (p, q, r), (l, m, n) = apart, pivots, factors  # noqa: E741
        # C⁻¹δ, by back substitution.
        w = multiply(z, r)
        v = subtract(multiply(y, q), multiply(n, w))
        u = subtract(subtract(multiply(x, p), multiply(l, v)), multiply(m, w))
        store(sums, 0, add(load(sums, 0), weight))
        store(sums, width, multiply_add(weight, u, load(sums, width)))
        store(sums, 2 * width, multiply_add(weight, v, load(sums, 2 * width)))
        store(sums, 3 * width, multiply_add(weight, w, load(sums, 3 * width)))
        # Of (C⁻¹δ)(C⁻¹δ)ᵀ log 2 − ½ C⁻¹: coordinates carry a factor √(½ log₂ e), whose square this undoes.
        outer = multiply(weight, splat(query.dtype.type(math.log(2))))
        half = multiply(weight, minus_half) if has_determinant else splat(query.dtype.type(0))
        # C⁻¹ = L⁻ᵀ D⁻¹ L⁻¹ with L⁻¹ = (1; −l 1; s −n 1).
        s = subtract(multiply(l, n), m)
        zero = splat(query.dtype.type(0))
        yz, xz = subtract(zero, multiply(n, r)), multiply(s, r)
        xx = multiply_add(s, xz, multiply_add(multiply(l, l), q, p))
        xy = subtract(multiply(s, yz), multiply(l, q))
        yy = subtract(q, multiply(n, yz))
        store(sums, 4 * width, multiply_add(outer, multiply(u, u), multiply_add(half, xx, load(sums, 4 * width))))
        store(sums, 5 * width, multiply_add(outer, multiply(u, v), multiply_add(half, xy, load(sums, 5 * width))))
        store(sums, 6 * width, multiply_add(outer, multiply(u, w), multiply_add(half, xz, load(sums, 6 * width))))
        store(sums, 7 * width, multiply_add(outer, multiply(v, v), multiply_add(half, yy, load(sums, 7 * width))))
        store(sums, 8 * width, multiply_add(outer, multiply(v, w), multiply_add(half, yz, load(sums, 8 * width))))
        store(sums, 9 * width, multiply_add(outer, multiply(w, w), multiply_add(half, r, load(sums, 9 * width))))


@njit
def _largest(query, i, keys, beta, tiles, lane):
    """The largest exponent of a row over a list of tiles."""
    width = lanes(lane)
    m = splat(query.dtype.type(-np.inf))
    for t in tiles:
        for j in range(0, TILE, width):
            apart, pivots, _ = _eliminated(query, i, keys, t, j)
            m = maximum(m, _exponent(beta, t * TILE + j, apart, pivots))
    store(lane, 0, m)
    return lane.max()


# Stale files of the cache on disk are found by the date of this one alone: the checksum is of what else is compiled in.
_FINGERPRINT = zlib.crc32(
    b"".join(Path(str(module.__file__)).read_bytes() for module in (_near, _simd, native, tiling))
)


def _attend_gaussians(fingerprint):
    def attend_gaussians(query, keys, beta, values, cutoff, begin, end, tiny, lse, out):
        """Attention of the query tiles begin … end − 1.

        query (T, TILE, 9); keys (S, 9, TILE) and beta (S, TILE); values (S, TILE, C) with C a multiple of a register's
        lanes, 0 for lse alone; lse (T, TILE) in base 2 and out (T, TILE, C) are written.
        """
        fingerprint  # noqa: B018
        width = lanes(query)
        sums, weights = np.empty((TILE, width), query.dtype), np.empty((ROWS, PART), query.dtype)
        shift, lane = np.empty(TILE, query.dtype), np.empty(width, query.dtype)
        found, most = np.empty(len(keys), np.int64), np.empty(len(keys), query.dtype)
        near = np.empty(PARTS * len(keys), np.int64)
        for tile in range(begin, end):
            q, o, total = query[tile], out[tile], lse[tile]
            count, least = _near_tiles(tile, cutoff, found, most)
            tiles = found[:count]
            shift[:] = most[:count].max() if count > 0 else 0.0  # a bound that no weight exceeds
            _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, o, weights)
            low = False
            for i in range(TILE):
                total[i] = sums[i].sum()
                low |= not total[i] >= tiny
            if low and count > 0:  # some rows came near the smallest float: again, at a scale of their own
                for i in range(TILE):
                    shift[i] = _largest(q, i, keys, beta, tiles, lane)
                _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, o, weights)
                for i in range(TILE):
                    total[i] = sums[i].sum()
            for i in range(TILE):
                if values.shape[2] > 0:
                    o[i] /= max(total[i], tiny)
                total[i] = math.log2(total[i]) + shift[i]

    return compiled(attend_gaussians)


attend_gaussians = _attend_gaussians(_FINGERPRINT)


def _add_gradients_of_tiles(fingerprint):
    def add_gradients(query, shift, rows, keys, beta, columns, cutoff, begin, end, result):
        """Σ_j s̄_ij (1, ∂s_ij/∂x_i, ∂s_ij/∂A_i) of the query tiles begin … end − 1, with s̄_ij = p_ij R_i · S_j.

        The weights are p_ij = 2^(β_j − shift_i − δᵀC⁻¹δ) / √det C. query (T, TILE, 9), shift (T, TILE) and rows R
        (T, TILE, K); keys (S, 9, TILE), beta (S, TILE) and columns S (S, K, TILE); result (T, TILE, 10) is written,
        its last six numbers those of a symmetric matrix by its upper triangle.
        """
        fingerprint  # noqa: B018
        width = lanes(query)
        sums = np.empty((10, width), query.dtype)
        found, most = np.empty(len(keys), np.int64), np.empty(len(keys), query.dtype)
        near = np.empty(PARTS * len(keys), np.int64)
        for tile in range(begin, end):
            q, r, s = query[tile], rows[tile], shift[tile]
            count, least = _near_tiles(tile, cutoff, found, most)
            for p in range(PARTS):
                parts = _near_parts(tile * PARTS + p, found[:count], cutoff, least, near)
                for i in range(p * PART, (p + 1) * PART):
                    sums[:] = 0
                    for n in range(parts):
                        t, first = near[n] // PARTS, near[n] % PARTS * PART
                        _add_gradients(q, i, s, r, keys, beta, columns, t, first, cutoff.has_determinant, sums)
                    for n in range(10):
                        result[tile, i, n] = sums[n].sum()

    return compiled(add_gradients)


add_gradients = _add_gradients_of_tiles(_FINGERPRINT)


def _list_near_gaussians(fingerprint):
    def list_near_gaussians(cutoff, counts, lists):
        """Writes how many key tiles matter to each query tile, and as many of them as fit a row of `lists`."""
        fingerprint  # noqa: B018
        size = cutoff.starts[1] * len(cutoff.tops)
        found, most = np.empty(size, np.int64), np.empty(size, cutoff.tops.dtype)
        for tile in range(len(counts)):
            counts[tile], _ = _near_tiles(tile, cutoff, found, most)
            for n in range(min(counts[tile], lists.shape[1])):
                lists[tile, n] = found[n]

    return compiled(list_near_gaussians)


list_near_gaussians = _list_near_gaussians(_FINGERPRINT)
