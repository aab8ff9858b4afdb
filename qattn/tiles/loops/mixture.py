"""Attention between Gaussians in space over the parts of tiles that matter, and its derivatives.

A Gaussian is given by nine numbers: its mean times √(½ log₂ e), and the upper triangle of its covariance.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled
from qattn.tiles.loops.cutoff import PARTS, near_parts, near_tiles, parts_in_reach, tiles_in_reach
from qattn.tiles.loops.simd import (
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
from qattn.tiles.sizes import PART, TILE

__all__ = ["attend_mixtures", "differentiate_mixtures"]

_NUMBERS = 9  # per Gaussian
_SUMS = 1 + _NUMBERS  # of cotangents, and of cotangents times derivatives


@njit(forceinline=True)
def _eliminated(query, i, keys, t, j):
    """Compute L⁻¹δ, D⁻¹ and L, with C = L D Lᵀ and δ = x_j − x_i, for one register of keys of tile t.

    Elimination loses log₁₀ κ digits, with κ the condition number of C; cofactors would lose twice as many.
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
    """Compute β_j − δᵀ C⁻¹ δ for one register of keys."""
    x, y, z = apart
    p, q, r = pivots
    form = multiply_add(multiply(x, x), p, multiply_add(multiply(y, y), q, multiply(multiply(z, z), r)))
    return subtract(load(beta, offset), form)


@njit(forceinline=True)
def _weight(beta, offset, shift, apart, pivots, has_determinant):
    """Compute 2^(β_j − shift_i − δᵀ C⁻¹ δ) / √det C."""
    weight = exp2(subtract(_exponent(beta, offset, apart, pivots), splat(shift)))
    if has_determinant:
        p, q, r = pivots
        weight = multiply(weight, root(multiply(multiply(p, q), r)))
    return weight


@njit(forceinline=True)
def _add_part(query, first, shift, keys, beta, values, t, begin, has_determinant, sums, out, weights):
    """Add the weights of a part of tile t to ROWS rows of sums, and the weighted values to the same rows of out."""
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
def _add_tiles(query, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, out, weights):
    """Sum, for each part of the queries, over the key parts of a list of tiles that contribute more than `least`."""
    sums[:] = 0
    out[:] = 0
    for p in range(PARTS):
        for n in range(near_parts(tile * PARTS + p, tiles, cutoff, least, near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            for first in range(p * PART, (p + 1) * PART, ROWS):
                _add_part(query, first, shift, keys, beta, values, t, begin, cutoff.has_determinant, sums, out, weights)


@njit(forceinline=True)
def _add_to_both(sums, columnwise, n, place, width, row_term, column_term):
    """Add a term to the n-th sum of a row, lane by lane, and one to a sum of columns, if column sums are needed."""
    store(sums, n * width, add(load(sums, n * width), row_term))
    if len(columnwise) > 0:
        store(columnwise, place + n * TILE, add(load(columnwise, place + n * TILE), column_term))


@njit(forceinline=True)
def _add_gradients(query, i, shift, rows, keys, beta, columns, t, begin, has_determinant, sums, columnwise, values):
    """Add the derivatives of a row and a part of tile t to the ten sums of the row and of each column.

    See `differentiate_mixtures`. Sums of the row are kept lane by lane.
    """
    width, channels = lanes(sums), columns.shape[1]
    minus_half = splat(query.dtype.type(-0.5))
    for j in range(begin, begin + PART, width):
        apart, pivots, factors = _eliminated(query, i, keys, t, j)
        weight = _weight(beta, t * TILE + j, shift[i], apart, pivots, has_determinant)
        for c in range(values.shape[1] if len(values) > 0 else 0):
            place = (t * values.shape[1] + c) * TILE + j
            store(values, place, multiply_add(weight, splat(rows[i, c]), load(values, place)))
        factor, zero = splat(query.dtype.type(0)), splat(query.dtype.type(0))
        for c in range(channels):
            factor = multiply_add(splat(rows[i, c]), load(columns, (t * channels + c) * TILE + j), factor)
        weight = multiply(weight, factor)
        (x, y, z), (p, q, r), (l, m, n) = apart, pivots, factors  # noqa: E741
        # C⁻¹δ, by back substitution.
        w = multiply(z, r)
        v = subtract(multiply(y, q), multiply(n, w))
        u = subtract(subtract(multiply(x, p), multiply(l, v)), multiply(m, w))
        place = t * _SUMS * TILE + j
        _add_to_both(sums, columnwise, 0, place, width, weight, weight)
        # δ is the mean of the key minus that of the query.
        x, y, z = multiply(weight, u), multiply(weight, v), multiply(weight, w)
        _add_to_both(sums, columnwise, 1, place, width, x, subtract(zero, x))
        _add_to_both(sums, columnwise, 2, place, width, y, subtract(zero, y))
        _add_to_both(sums, columnwise, 3, place, width, z, subtract(zero, z))
        # (C⁻¹δ)(C⁻¹δ)ᵀ log 2 − ½ C⁻¹, where log 2 removes the squared factor √(½ log₂ e) of the coordinates.
        outer = multiply(weight, splat(query.dtype.type(math.log(2))))
        half = multiply(weight, minus_half) if has_determinant else zero
        # C⁻¹ = L⁻ᵀ D⁻¹ L⁻¹ with L⁻¹ = (1; −l 1; s −n 1).
        s = subtract(multiply(l, n), m)
        yz, xz = subtract(zero, multiply(n, r)), multiply(s, r)
        xx = multiply_add(s, xz, multiply_add(multiply(l, l), q, p))
        xy = subtract(multiply(s, yz), multiply(l, q))
        yy = subtract(q, multiply(n, yz))
        xx = multiply_add(outer, multiply(u, u), multiply(half, xx))
        xy = multiply_add(outer, multiply(u, v), multiply(half, xy))
        xz = multiply_add(outer, multiply(u, w), multiply(half, xz))
        yy = multiply_add(outer, multiply(v, v), multiply(half, yy))
        yz = multiply_add(outer, multiply(v, w), multiply(half, yz))
        zz = multiply_add(outer, multiply(w, w), multiply(half, r))
        _add_to_both(sums, columnwise, 4, place, width, xx, xx)
        _add_to_both(sums, columnwise, 5, place, width, xy, xy)
        _add_to_both(sums, columnwise, 6, place, width, xz, xz)
        _add_to_both(sums, columnwise, 7, place, width, yy, yy)
        _add_to_both(sums, columnwise, 8, place, width, yz, yz)
        _add_to_both(sums, columnwise, 9, place, width, zz, zz)


@njit
def _largest(query, i, keys, beta, tiles, lane):
    """Compute the largest exponent of a row over a list of tiles."""
    width = lanes(lane)
    m = splat(query.dtype.type(-np.inf))
    for t in tiles:
        for j in range(0, TILE, width):
            apart, pivots, _ = _eliminated(query, i, keys, t, j)
            m = maximum(m, _exponent(beta, t * TILE + j, apart, pivots))
    store(lane, 0, m)
    return lane.max()


@compiled
def attend_mixtures(query, keys, beta, values, cutoff, tiny, lse, out, begin, end):
    """Attention of the query tiles begin … end − 1.

    query (T, TILE, 9); keys (S, 9, TILE) and beta (S, TILE); values (S, TILE, C) with C a multiple of the lanes of a
    register, 0 for lse alone. lse (T, TILE) in base 2 and out (T, TILE, C) are written.
    """
    width = lanes(query)
    sums, weights = np.empty((TILE, width), query.dtype), np.empty((ROWS, PART), query.dtype)
    shift, lane = np.empty(TILE, query.dtype), np.empty(width, query.dtype)
    seen, most, smallest = np.empty(len(keys), np.int64), np.empty(len(keys), query.dtype), np.empty(len(keys))
    near = np.empty(PARTS * len(keys), np.int64)
    for tile in range(begin, end):
        q, o, total = query[tile], out[tile], lse[tile]
        count, least = near_tiles(tile, cutoff, seen, most, smallest)
        tiles = seen[:count]
        shift[:] = most[:count].max() if count > 0 else 0.0  # an upper bound of all weights
        _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, o, weights)
        low = False
        for i in range(TILE):
            total[i] = sums[i].sum()
            low |= not total[i] >= tiny
        if low and count > 0:  # rows near the smallest float are computed again, relative to their own maximum
            for i in range(TILE):
                shift[i] = _largest(q, i, keys, beta, tiles, lane)
            _add_tiles(q, tile, shift, keys, beta, values, tiles, cutoff, least, near, sums, o, weights)
            for i in range(TILE):
                total[i] = sums[i].sum()
        for i in range(TILE):
            if values.shape[2] > 0:
                o[i] /= max(total[i], tiny)
            total[i] = math.log2(total[i]) + shift[i]


@compiled
def differentiate_mixtures(
    query, shift, rows, keys, beta, columns, cutoff, reach, rowwise, columnwise, values, begin, end, first, last
):
    """Add the derivatives of the query tiles begin … end − 1 and the key tiles first … last − 1 to sums over pairs.

    With p_ij = 2^(β_j − shift_i − δᵀC⁻¹δ) / √det C and s̄_ij = p_ij R_i · S_j, they are

        rowwise (T, TILE, 10)       Σ_j s̄_ij (1, ∂s_ij/∂x_i, ∂s_ij/∂A_i),
        columnwise (S, 10, TILE)    Σ_i s̄_ij (1, ∂s_ij/∂y_j, ∂s_ij/∂B_j),
        values (S, C′, TILE)        Σ_i p_ij R_i, of the first C′ channels.

    The last six numbers are the upper triangle of a symmetric matrix. query (T, TILE, 9), shift (T, TILE) and rows R
    (T, TILE, C); keys (S, 9, TILE), beta (S, TILE) and columns S (S, C, TILE). columnwise and values may be empty. The
    key tiles should be a node of their tree.
    """
    width = lanes(query)
    sums = np.empty((_SUMS, width), query.dtype)
    seen, near = np.empty(last - first, np.int64), np.empty(PARTS * (last - first), np.int64)
    for tile in range(begin, end):
        q, r, s = query[tile], rows[tile], shift[tile]
        count = tiles_in_reach(tile, cutoff, reach, first, last, seen)
        for p in range(PARTS):
            parts = parts_in_reach(tile * PARTS + p, seen[:count], cutoff, reach, near)
            for i in range(p * PART, (p + 1) * PART):
                sums[:] = 0
                for n in range(parts):
                    t, start = near[n] // PARTS, near[n] % PARTS * PART
                    _add_gradients(
                        q, i, s, r, keys, beta, columns, t, start, cutoff.has_determinant, sums, columnwise, values
                    )
                for n in range(_SUMS):
                    rowwise[tile, i, n] += sums[n].sum()
