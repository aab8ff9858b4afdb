"""Gaussian attention over tiles of keys, and its derivatives.

Weights are 2^(c (β_j − ‖q_i − k_j‖²)) with one scale c per cloud and biases β. Each costs d differences of the original
coordinates, d multiply-adds and one exp2. Keys are stored tile by tile and coordinate by coordinate. With a cut-off,
each part of a query tile attends only to those parts of key tiles that matter to it.

Weights are first summed relative to the largest bias of the cloud, which needs no running maximum. That is exact unless
the sum of a row is near the smallest float. Such rows are recognized by their sum, and computed again relative to their
own largest exponent.
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
    exp2_of_product,
    lanes,
    load,
    maximum,
    minus_square,
    multiply,
    multiply_add,
    multiply_add_rows,
    splat,
    store,
    store_rows,
    subtract,
    sum_of,
    zero_rows,
)
from qattn.tiles.tiling import PART, TILE

__all__ = ["attend_tiles", "differentiate_tiles"]


# Tiles of keys are passed as an index t, not as slices: Numba would count references to those, each at the cost of a
# hundred weights.


@njit(forceinline=True)
def _exponent(query, i, shift, keys, beta, t, j, dims):
    """Compute β_j − ‖q_i − k_j‖² − shift_i for one register of keys of tile t."""
    d = len(dims) if len(dims) > 0 else query.shape[1]
    s = load(beta, t * TILE + j)
    for c in range(d):
        s = minus_square(s, load(keys, (t * d + c) * TILE + j), splat(query[i, c]))
    if shift is not None:  # last, so that the largest exponent is exactly 0, however far the keys are
        s = add(s, splat(-shift[i]))
    return s


@njit(forceinline=True)
def _add_maximum(query, keys, beta, t, dims, largest):
    """Update the largest exponents of all rows of a query tile by one tile of keys, lane by lane."""
    width = lanes(largest)
    for i in range(TILE):
        m = load(largest, i * width)
        for j in range(0, TILE, width):
            m = maximum(m, _exponent(query, i, None, keys, beta, t, j, dims))
        store(largest, i * width, m)


@njit(forceinline=True)
def _add_weights(query, first, rows, shift, scale, keys, beta, t, begin, end, dims, sums, weights):
    """Add the weights of the keys begin … end − 1 of tile t to rows of sums, lane by lane; store them in `weights`."""
    width, factor = lanes(sums), splat(scale)
    for r in range(rows):
        i = first + r
        total = load(sums, i * width)
        for j in range(begin, end, width):
            w = exp2_of_product(factor, _exponent(query, i, shift, keys, beta, t, j, dims))
            total = add(total, w)
            if weights is not None:
                store(weights, r * TILE + j, w)
        store(sums, i * width, total)


@njit(forceinline=True)
def _add_products(weights, values, t, begin, end, i, out):
    """Add weights (ROWS, TILE) times the values of the keys begin … end − 1 of tile t to rows of out from i on."""
    channels = values.shape[2]
    for c in range(0, channels, lanes(weights)):
        total = zero_rows(out)  # from zero: added to a large sum one by one, small terms would be lost to rounding
        for j in range(begin, end):
            total = multiply_add_rows(total, weights, j, TILE, load(values, (t * TILE + j) * channels + c))
        add_rows(out, i * channels + c, channels, total)


@njit(forceinline=True)
def _add_keys(query, first, rows, shift, scale, keys, beta, values, t, begin, end, dims, sums, out, weights):
    """Add weights to sums and, if there are values, weighted values to out."""
    if values.shape[2] == 0:
        _add_weights(query, first, rows, shift, scale, keys, beta, t, begin, end, dims, sums, None)
        return
    for i in range(first, first + rows, ROWS):
        _add_weights(query, i, ROWS, shift, scale, keys, beta, t, begin, end, dims, sums, weights)
        _add_products(weights, values, t, begin, end, i, out)


@njit
def _add_all(query, shift, scale, keys, beta, values, tiles, dims, sums, out, weights):
    """Compute the sums over all keys of a list of tiles."""
    sums[:] = 0
    out[:] = 0
    for t in tiles:
        _add_keys(query, 0, TILE, shift, scale, keys, beta, values, t, 0, TILE, dims, sums, out, weights)


@njit
def _add_near(query, tile, shift, scale, keys, beta, values, tiles, cutoff, least, near, dims, sums, out, weights):
    """Compute the sums over the parts of a list of tiles that add more than `least`, for each part of the queries."""
    sums[:] = 0
    out[:] = 0
    for p in range(PARTS):
        for n in range(near_parts(tile * PARTS + p, tiles, cutoff, least, near)):
            t, begin, end = near[n] // PARTS, near[n] % PARTS * PART, near[n] % PARTS * PART + PART
            _add_keys(query, p * PART, PART, shift, scale, keys, beta, values, t, begin, end, dims, sums, out, weights)


@njit(forceinline=True)
def _aligned(size, dtype):
    """Allocate an array aligned to a cache line: registers across two lines load at half the speed."""
    array = np.empty(size + 64, dtype)
    skip = (-array.ctypes.data % 64) // array.itemsize
    return array[skip : skip + size]


@compiled
def attend_tiles(query, scales, keys, beta, values, key_tiles, cutoff, tiny, dims, lse, out, begin, end):
    """Attention of the query tiles begin … end − 1 to the tiles of keys that matter, or to all of their cloud.

    query (T, TILE, d); scales (clouds,); keys (S, d, TILE) and beta (S, TILE); values (S, TILE, C) with C a multiple of
    the lanes of a register, 0 for lse alone; key_tiles (T, 2), the range of key tiles of the cloud of each query tile.
    lse (T, TILE) in base 2 and out (T, TILE, C) are written. `dims` is a tuple of d items, so that d is a constant to
    the compiler, or empty.
    """
    sums = _aligned(TILE * lanes(query), query.dtype).reshape(TILE, lanes(query))
    weights = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
    shift = np.empty(TILE, query.dtype)
    seen, near = np.empty(len(keys), np.int64), np.empty(PARTS * len(keys), np.int64)
    most, smallest = np.empty(len(keys), query.dtype), np.empty(len(keys), query.dtype)
    least = query.dtype.type(0)
    for tile in range(begin, end):
        q, o, total = query[tile], out[tile], lse[tile]
        scale = scales[tile * len(scales) // len(query)]
        if cutoff is None:
            tiles = np.arange(key_tiles[tile, 0], key_tiles[tile, 1])
        else:
            count, least = near_tiles(tile, cutoff, seen, most, smallest)
            tiles = seen[:count]
        if cutoff is None:
            _add_all(q, None, scale, keys, beta, values, tiles, dims, sums, o, weights)
        else:
            _add_near(q, tile, None, scale, keys, beta, values, tiles, cutoff, least, near, dims, sums, o, weights)
        shift[:] = 0
        low = False
        for i in range(TILE):
            total[i] = sum_of(load(sums, i * lanes(sums)))
            low |= not total[i] >= tiny
        if low:
            sums[:] = -np.inf
            for t in tiles:
                _add_maximum(q, keys, beta, t, dims, sums)
            for i in range(TILE):
                shift[i] = sums[i].max()
            if cutoff is None:
                _add_all(q, shift, scale, keys, beta, values, tiles, dims, sums, o, weights)
            else:
                _add_near(q, tile, shift, scale, keys, beta, values, tiles, cutoff, least, near, dims, sums, o, weights)
            for i in range(TILE):
                total[i] = sum_of(load(sums, i * lanes(sums)))
        for i in range(TILE):
            if values.shape[2] > 0:
                o[i] /= max(total[i], tiny)
            total[i] = math.log2(total[i]) + scale * shift[i]


@njit(forceinline=True)
def _add_derivatives(query, first, shift, scale, rows, keys, beta, columns, t, begin, end, dims, sums, products):
    """Add derivatives of the keys begin … end − 1 of tile t to sums (ROWS, d + 2, lanes) of rows from `first` on."""
    width, channels, factor = lanes(products), columns.shape[1], splat(scale)
    d = len(dims) if len(dims) > 0 else query.shape[1]
    for j in range(begin, end, width):
        product = zero_rows(products)
        for c in range(channels):
            column = load(columns, (t * channels + c) * TILE + j)
            product = multiply_add_rows(product, rows, first * channels + c, channels, column)
        store_rows(products, 0, width, product)
        for r in range(ROWS):
            i, place = first + r, r * (d + 2) * width
            weight = exp2_of_product(factor, _exponent(query, i, shift, keys, beta, t, j, dims))
            weight = multiply(weight, load(products, r * width))
            store(sums, place, add(load(sums, place), weight))
            square = splat(query.dtype.type(0))
            for c in range(d):
                apart = subtract(load(keys, (t * d + c) * TILE + j), splat(query[i, c]))
                square = multiply_add(apart, apart, square)
                place += width
                store(sums, place, multiply_add(weight, apart, load(sums, place)))
            store(sums, place + width, multiply_add(weight, square, load(sums, place + width)))


@compiled
def differentiate_tiles(query, scales, shift, rows, keys, beta, columns, key_tiles, cutoff, dims, result, begin, end):
    """Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) of the query tiles begin … end − 1, with s̄_ij = p_ij R_i · S_j.

    The weights are p_ij = 2^(c (β_j − ‖q_i − k_j‖² − shift_i)). query (T, TILE, d), shift (T, TILE) and rows R
    (T, TILE, C); keys (S, d, TILE), beta (S, TILE) and columns S (S, C, TILE); result (T, TILE, d + 2) is written.
    For the other arguments see `attend_tiles`.
    """
    d, width = query.shape[2], lanes(query)
    sums = _aligned(ROWS * (d + 2) * width, query.dtype).reshape(ROWS, d + 2, width)
    products = _aligned(ROWS * width, query.dtype).reshape(ROWS, width)
    seen, near = np.empty(len(keys), np.int64), np.empty(PARTS * len(keys), np.int64)
    most, smallest = np.empty(len(keys), query.dtype), np.empty(len(keys), query.dtype)
    for tile in range(begin, end):
        q, r, s = query[tile], rows[tile], shift[tile]
        scale = scales[tile * len(scales) // len(query)]
        count, least = 0, query.dtype.type(0)
        if cutoff is not None:
            count, least = near_tiles(tile, cutoff, seen, most, smallest)
        for p in range(PARTS):
            parts = 0
            if cutoff is not None:
                parts = near_parts(tile * PARTS + p, seen[:count], cutoff, least, near)
            for first in range(p * PART, (p + 1) * PART, ROWS):
                sums[:] = 0
                if cutoff is None:
                    for t in range(key_tiles[tile, 0], key_tiles[tile, 1]):
                        _add_derivatives(q, first, s, scale, r, keys, beta, columns, t, 0, TILE, dims, sums, products)
                for n in range(parts):
                    t, start = near[n] // PARTS, near[n] % PARTS * PART
                    _add_derivatives(
                        q, first, s, scale, r, keys, beta, columns, t, start, start + PART, dims, sums, products
                    )
                for i in range(ROWS):
                    for n in range(d + 2):
                        result[tile, first + i, n] = sums[i, n].sum()
