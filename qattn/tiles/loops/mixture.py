"""Attention between Gaussians in space over the parts of tiles that matter, and its derivatives.

A Gaussian is given by nine numbers: its mean times √(½ log₂ e), and the upper triangle of its covariance.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled
from qattn.tiles.loops.cutoff import PARTS, near_parts, near_tiles
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
from qattn.tiles.tiling import PART, TILE

__all__ = ["attend_mixtures", "differentiate_mixtures"]

_NUMBERS = 9  # per Gaussian


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
    """Add the weights of a part of tile t to ROWS rows of sums, and the weighted values to those of out."""
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
    """Compute the sums over the parts of a list of tiles that add more than `least`, for each part of the queries."""
    sums[:] = 0
    out[:] = 0
    for p in range(PARTS):
        for n in range(near_parts(tile * PARTS + p, tiles, cutoff, least, near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            for first in range(p * PART, (p + 1) * PART, ROWS):
                _add_part(query, first, shift, keys, beta, values, t, begin, cutoff.has_determinant, sums, out, weights)


@njit(forceinline=True)
def _add_gradients(query, i, shift, rows, keys, beta, columns, t, begin, has_determinant, sums):
    """Add the derivatives of a part of tile t to the ten sums of a row, lane by lane; see `differentiate_mixtures`."""
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
        # (C⁻¹δ)(C⁻¹δ)ᵀ log 2 − ½ C⁻¹, where log 2 removes the squared factor √(½ log₂ e) of the coordinates.
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
def differentiate_mixtures(query, shift, rows, keys, beta, columns, cutoff, result, begin, end):
    """Σ_j s̄_ij (1, ∂s_ij/∂x_i, ∂s_ij/∂A_i) of the query tiles begin … end − 1, with s̄_ij = p_ij R_i · S_j.

    The weights are p_ij = 2^(β_j − shift_i − δᵀC⁻¹δ) / √det C. query (T, TILE, 9), shift (T, TILE) and rows R
    (T, TILE, K); keys (S, 9, TILE), beta (S, TILE) and columns S (S, K, TILE); result (T, TILE, 10) is written. Its
    last six numbers are the upper triangle of a symmetric matrix.
    """
    width = lanes(query)
    sums = np.empty((10, width), query.dtype)
    seen, most, smallest = np.empty(len(keys), np.int64), np.empty(len(keys), query.dtype), np.empty(len(keys))
    near = np.empty(PARTS * len(keys), np.int64)
    for tile in range(begin, end):
        q, r, s = query[tile], rows[tile], shift[tile]
        count, least = near_tiles(tile, cutoff, seen, most, smallest)
        for p in range(PARTS):
            parts = near_parts(tile * PARTS + p, seen[:count], cutoff, least, near)
            for i in range(p * PART, (p + 1) * PART):
                sums[:] = 0
                for n in range(parts):
                    t, first = near[n] // PARTS, near[n] % PARTS * PART
                    _add_gradients(q, i, s, r, keys, beta, columns, t, first, cutoff.has_determinant, sums)
                for n in range(10):
                    result[tile, i, n] = sums[n].sum()
