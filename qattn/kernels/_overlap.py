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
from qattn.attention import _near, _simd
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

__all__ = ["Cutoff", "Nodes", "attend_gaussians", "list_near_gaussians"]

PARTS = TILE // PART
_NUMBERS = 9  # of a Gaussian
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
    tops: np.ndarray  # (clouds, nodes) log₂ Σ 2^β of the keys
    part_tops: np.ndarray
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
        # No covariance is less than the unit matrix, and no determinant more than that of the widest.
        floor = max(floor, _most(top, box_span(boxes, box, nodes, node), 1.0, widest, cutoff.has_determinant))
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
def _exponent(query, i, keys, beta, t, j):
    """β_j − (x_i − x_j)ᵀ C⁻¹ (x_i − x_j) and 1 / det C, for one register of keys of the tile t."""
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
    # C = (a b c; b d e; c e f), and its adjugate by the same pattern.
    xx = subtract(multiply(d, f), multiply(e, e))
    xy = subtract(multiply(c, e), multiply(b, f))
    xz = subtract(multiply(b, e), multiply(c, d))
    yy = subtract(multiply(a, f), multiply(c, c))
    yz = subtract(multiply(b, c), multiply(a, e))
    zz = subtract(multiply(a, d), multiply(b, b))
    inverse = divide(splat(query.dtype.type(1)), multiply_add(a, xx, multiply_add(b, xy, multiply(c, xz))))
    u = multiply_add(xx, x, multiply_add(xy, y, multiply(xz, z)))
    v = multiply_add(xy, x, multiply_add(yy, y, multiply(yz, z)))
    w = multiply_add(xz, x, multiply_add(yz, y, multiply(zz, z)))
    form = multiply_add(u, x, multiply_add(v, y, multiply(w, z)))
    return subtract(load(beta, t * TILE + j), multiply(form, inverse)), inverse


@njit(forceinline=True)
def _add_part(query, first, shift, keys, beta, values, t, begin, has_determinant, sums, out, weights):
    """Adds the weights of a part of the tile t to ROWS rows of sums, and its weighted values to those of out."""
    width, channels = lanes(sums), values.shape[2]
    for r in range(ROWS):
        i = first + r
        total = load(sums, i * width)
        for j in range(begin, begin + PART, width):
            exponent, inverse = _exponent(query, i, keys, beta, t, j)
            w = exp2(subtract(exponent, splat(shift[i])))
            if has_determinant:
                w = multiply(w, root(inverse))
            total = add(total, w)
            store(weights, r * PART + j - begin, w)
        store(sums, i * width, total)
    for c in range(0, channels, width):
        product = zero_rows(out)
        for j in range(PART):
            value = load(values, (t * TILE + begin + j) * channels + c)
            product = multiply_add_rows(product, weights, j, PART, value)
        add_rows(out, first * channels + c, channels, product)


@njit
def _add_tiles(query, tile, shift, keys, beta, values, tiles, cutoff, least, sums, out, weights):
    """The parts of a list of tiles that have more than `least`, from zero; by parts of the queries."""
    sums[:] = 0
    out[:] = 0
    rows, others = cutoff.query_parts, cutoff.key_parts
    for p in range(PARTS):
        row = tile * PARTS + p
        for t in tiles:
            for n in range(PARTS):
                part = t * PARTS + n
                gap = box_gap(rows.boxes, row, others.boxes, part)
                spread, size = rows.spread[row] + others.spread[part], rows.size[row] + others.size[part]
                if _most(cutoff.part_tops[part], gap, spread, size, cutoff.has_determinant) > least:
                    for first in range(p * PART, (p + 1) * PART, ROWS):
                        _add_part(
                            query, first, shift, keys, beta, values, t, n * PART, cutoff.has_determinant, sums, out,
                            weights,
                        )  # fmt: skip


@njit
def _largest(query, i, keys, beta, tiles, lane):
    """The largest exponent of a row over a list of tiles."""
    width = lanes(lane)
    m = splat(query.dtype.type(-np.inf))
    for t in tiles:
        for j in range(0, TILE, width):
            m = maximum(m, _exponent(query, i, keys, beta, t, j)[0])
    store(lane, 0, m)
    return lane.max()


# Stale files of the cache on disk are found by the date of this one alone: the checksum is of what else is compiled in.
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
        for tile in range(begin, end):
            q, o, total = query[tile], out[tile], lse[tile]
            count, least = _near_tiles(tile, cutoff, found, most)
            tiles = found[:count]
            shift[:] = most[:count].max() if count > 0 else 0.0  # a bound that no weight exceeds
            _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, sums, o, weights)
            low = False
            for i in range(TILE):
                total[i] = sums[i].sum()
                low |= not total[i] >= tiny
            if low and count > 0:  # some rows came near the smallest float: again, at a scale of their own
                for i in range(TILE):
                    shift[i] = _largest(q, i, keys, beta, tiles, lane)
                _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, sums, o, weights)
                for i in range(TILE):
                    total[i] = sums[i].sum()
            for i in range(TILE):
                if values.shape[2] > 0:
                    o[i] /= max(total[i], tiny)
                total[i] = math.log2(total[i]) + shift[i]

    return compiled(attend_gaussians)


attend_gaussians = _attend_gaussians(
    zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in (_near, _simd, tiling)))
)


@compiled
def list_near_gaussians(cutoff, counts, lists):
    """Writes how many key tiles matter to each query tile, and as many of them as fit a row of `lists`."""
    size = cutoff.starts[1] * len(cutoff.tops)
    found, most = np.empty(size, np.int64), np.empty(size, cutoff.tops.dtype)
    for tile in range(len(counts)):
        counts[tile], _ = _near_tiles(tile, cutoff, found, most)
        for n in range(min(counts[tile], lists.shape[1])):
            lists[tile, n] = found[n]
