"""The compiled loops of the `native` backend: Gaussian attention over tiles of keys, with differences taken directly.

Keys are stored tile by tile and coordinate by coordinate. Coordinates and biases carry factors that turn exp(b −
½‖q − k‖²) into 2^(β − ‖q − k‖²), so that a weight costs d differences, d multiply-adds and one exp2. With a cut-off,
each part of a tile of queries meets only those parts of a tile of keys that matter to it. The same pass may average
values times ‖q − k‖² too, which is what derivatives by the bandwidth are made of.

Weights are first summed at a common scale, the largest bias of the cloud, which needs no running maximum. That is
exact unless the sum of a row comes near the smallest float; such rows show by their sum, and are done again at a scale
of their own.
"""

# mypy: disable-error-code="no-untyped-def"

import math
import zlib
from pathlib import Path

import numpy as np
from numba import njit

from qattn import tiling
from qattn._compiled import compiled
from qattn.attention import _near, _simd, native
from qattn.attention._near import near_parts, near_tiles
from qattn.attention._simd import (
    ROWS,
    add,
    add_rows,
    exp2,
    lanes,
    load,
    maximum,
    minus_square,
    multiply,
    multiply_add_rows,
    splat,
    store,
    subtract,
    sum_of,
    zero_rows,
)
from qattn.tiling import PART, TILE

PARTS = TILE // PART


# Tiles of keys are given by their number t and not as slices: those would be counted as references, at the cost of a
# hundred weights each.


@njit(forceinline=True)
def _exponent(query, i, shift, keys, beta, t, j, dims):
    """β_j − ‖q_i − k_j‖² − shift_i for one register of keys of the tile t."""
    s = _minus_squares(load(beta, t * TILE + j), query, i, keys, t, j, dims)
    if shift is not None:  # last, so that the largest is 0 however far the keys are
        s = add(s, splat(-shift[i]))
    return s


@njit(forceinline=True)
def _minus_squares(s, query, i, keys, t, j, dims):
    """s − ‖q_i − k_j‖² for one register of keys of the tile t."""
    d = len(dims) if len(dims) > 0 else query.shape[1]
    for c in range(d):
        s = minus_square(s, load(keys, (t * d + c) * TILE + j), splat(query[i, c]))
    return s


@njit(forceinline=True)
def _add_maximum(query, keys, beta, t, dims, largest):
    """Raises largest[i] to the exponents of one tile of keys, lane by lane, for all rows of one tile of queries."""
    width = lanes(largest)
    for i in range(TILE):
        m = load(largest, i * width)
        for j in range(0, TILE, width):
            m = maximum(m, _exponent(query, i, None, keys, beta, t, j, dims))
        store(largest, i * width, m)


@njit(forceinline=True)
def _add_weights(query, first, rows, shift, keys, beta, t, begin, end, dims, sums, weights, squares):
    """Adds the weights of the keys begin … end − 1 of a tile to some rows of sums, lane by lane.

    Writes them, and them times ‖q − k‖², where there is room for it.
    """
    width = lanes(sums)
    for r in range(rows):
        i = first + r
        total = load(sums, i * width)
        for j in range(begin, end, width):
            w = exp2(_exponent(query, i, shift, keys, beta, t, j, dims))
            total = add(total, w)
            if weights is not None:
                store(weights, r * TILE + j, w)
            if squares is not None:
                zero = splat(query.dtype.type(0))
                square = subtract(zero, _minus_squares(zero, query, i, keys, t, j, dims))
                store(squares, r * TILE + j, multiply(w, square))
        store(sums, i * width, total)


@njit(forceinline=True)
def _add_products(weights, values, t, begin, end, i, out):
    """Adds weights (ROWS, TILE) times the values of the keys begin … end − 1 of a tile to the rows of out from i on."""
    channels = values.shape[2]
    for c in range(0, channels, lanes(weights)):
        total = zero_rows(out)  # from zero: added to a long sum one by one, small weights would round away
        for j in range(begin, end):
            total = multiply_add_rows(total, weights, j, TILE, load(values, (t * TILE + j) * channels + c))
        add_rows(out, i * channels + c, channels, total)


@njit(forceinline=True)
def _add_keys(query, tile, first, rows, shift, keys, beta, values, t, begin, end, dims, sums, out, moments, buffers):
    """Adds weights to sums and, if there are values, weighted values to out and moments: products with buffers."""
    weights, squares = buffers
    if values.shape[2] == 0:
        _add_weights(query, first, rows, shift, keys, beta, t, begin, end, dims, sums, None, None)
        return
    for i in range(first, first + rows, ROWS):
        if moments is None:
            _add_weights(query, i, ROWS, shift, keys, beta, t, begin, end, dims, sums, weights, None)
        else:
            _add_weights(query, i, ROWS, shift, keys, beta, t, begin, end, dims, sums, weights, squares)
            _add_products(squares, values, t, begin, end, tile * TILE + i, moments)
        _add_products(weights, values, t, begin, end, i, out)


@njit
def _add_all(query, tile, shift, keys, beta, values, tiles, dims, sums, out, moments, buffers):
    """All keys of a list of tiles, from zero."""
    _clear(tile, sums, out, moments)
    for t in tiles:
        _add_keys(query, tile, 0, TILE, shift, keys, beta, values, t, 0, TILE, dims, sums, out, moments, buffers)


@njit
def _add_near(query, tile, shift, keys, beta, values, tiles, cutoff, least, near, dims, sums, out, moments, buffers):
    """Those parts of a list of tiles that have more than `least`, from zero; by parts of the queries."""
    _clear(tile, sums, out, moments)
    for p in range(PARTS):
        for n in range(near_parts(tile * PARTS + p, tiles, cutoff, least, PARTS, near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            end = begin + PART
            _add_keys(
                query, tile, p * PART, PART, shift, keys, beta, values, t, begin, end, dims, sums, out, moments, buffers
            )


@njit
def _clear(tile, sums, out, moments):
    sums[:] = 0
    out[:] = 0
    if moments is not None:
        moments[tile] = 0


@njit(forceinline=True)
def _aligned(size, dtype):
    """An empty array that starts where a cache line does: registers that straddle two lines load at half the speed."""
    array = np.empty(size + 64, dtype)
    skip = (-array.ctypes.data % 64) // array.itemsize
    return array[skip : skip + size]


# Stale files of the cache on disk are found by the date of this one alone: the checksum is of what else is compiled in.
def _attend_tiles(fingerprint):
    def attend_tiles(query, keys, beta, values, key_tiles, cutoff, begin, end, tiny, dims, lse, out, moments):
        """Attention of the query tiles begin … end − 1 to the tiles of keys that matter, or to all of their cloud.

        query (T, TILE, d); keys (S, d, TILE) and beta (S, TILE); values (S, TILE, C) with C a multiple of a register's
        lanes, 0 for lse alone; key_tiles (T, 2), where those of its cloud begin and end; lse (T, TILE) in base 2,
        out (T, TILE, C) and, unless it is None, moments (T, TILE, C), averages of values times ‖q − k‖², are written.
        `dims` is a tuple of d items, which tells the compiler d, or empty.
        """
        fingerprint  # noqa: B018
        sums = _aligned(TILE * lanes(query), query.dtype).reshape(TILE, lanes(query))
        weights = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
        squares = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
        buffers = weights, squares
        shift = np.empty(TILE, query.dtype)
        seen, near = np.empty(len(keys), np.int64), np.empty(PARTS * len(keys), np.int64)
        most, smallest = np.empty(len(keys), query.dtype), np.empty(len(keys), query.dtype)
        least = query.dtype.type(0)
        for tile in range(begin, end):
            q, o, total = query[tile], out[tile], lse[tile]
            if cutoff is None:
                tiles = np.arange(key_tiles[tile, 0], key_tiles[tile, 1])
            else:
                count, least = near_tiles(tile, cutoff, seen, most, smallest)
                tiles = seen[:count]
            if cutoff is None:
                _add_all(q, tile, None, keys, beta, values, tiles, dims, sums, o, moments, buffers)
            else:
                _add_near(
                    q, tile, None, keys, beta, values, tiles, cutoff, least, near, dims, sums, o, moments, buffers
                )
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
                    _add_all(q, tile, shift, keys, beta, values, tiles, dims, sums, o, moments, buffers)
                else:
                    _add_near(
                        q, tile, shift, keys, beta, values, tiles, cutoff, least, near, dims, sums, o, moments, buffers
                    )
                for i in range(TILE):
                    total[i] = sum_of(load(sums, i * lanes(sums)))
            for i in range(TILE):
                if values.shape[2] > 0:
                    o[i] /= max(total[i], tiny)
                    if moments is not None:
                        moments[tile, i] /= max(total[i], tiny)
                total[i] = math.log2(total[i]) + shift[i]

    return compiled(attend_tiles)


attend_tiles = _attend_tiles(
    zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in (_near, _simd, native, tiling)))
)
