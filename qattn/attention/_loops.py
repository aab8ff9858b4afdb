"""The compiled loops of the `native` backend: Gaussian attention over tiles of keys, with differences taken directly.

A *tile* is `TILE` points. Keys are stored tile by tile and coordinate by coordinate, their biases as one more
coordinate. Both carry a factor that turns exp(b − ½‖q − k‖²) into 2^(β − ‖q − k‖²), so that a weight costs d
differences, d multiply-adds and one exp2.

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

from qattn.attention import _simd, native
from qattn.attention._simd import (
    ROWS,
    add,
    add_rows,
    exp2,
    lanes,
    load,
    maximum,
    minus_square,
    multiply_add_rows,
    splat,
    store,
    zero_rows,
)
from qattn.attention.native import TILE


@njit
def _exponent(query, i, shift, tile, j, dims):
    """β_j − ‖q_i − k_j‖² − shift_i for one register of keys."""
    d = len(dims) if len(dims) > 0 else query.shape[1]
    s = load(tile, d * TILE + j)
    if shift is not None:
        s = add(s, splat(-shift[i]))
    for c in range(d):
        s = minus_square(s, load(tile, c * TILE + j), splat(query[i, c]))
    return s


@njit
def _add_maximum(query, tile, dims, largest):
    """Raises largest[i] to the exponents of one tile of keys, lane by lane, for all rows of one tile of queries."""
    width = lanes(largest)
    for i in range(TILE):
        m = load(largest, i * width)
        for j in range(0, TILE, width):
            m = maximum(m, _exponent(query, i, None, tile, j, dims))
        store(largest, i * width, m)


@njit
def _add_weights(query, shift, tile, dims, sums):
    """Adds the weights of one tile of keys to sums[i], lane by lane, for all rows of one tile of queries."""
    width = lanes(sums)
    for i in range(TILE):
        total = load(sums, i * width)
        for j in range(0, TILE, width):
            total = add(total, exp2(_exponent(query, i, shift, tile, j, dims)))
        store(sums, i * width, total)


@njit
def _add_values(query, shift, tile, values, dims, sums, out, weights):
    """As `_add_weights`, and adds the weighted values to out[i]: a small matrix product with a buffer of weights."""
    width = lanes(sums)
    channels = values.shape[1]
    for i in range(0, TILE, ROWS):
        for r in range(ROWS):
            total = load(sums, (i + r) * width)
            for j in range(0, TILE, width):
                w = exp2(_exponent(query, i + r, shift, tile, j, dims))
                total = add(total, w)
                store(weights, r * TILE + j, w)
            store(sums, (i + r) * width, total)
        for c in range(0, channels, width):
            rows = zero_rows(out)  # each tile from zero: added to a long sum one by one, small weights would round away
            for j in range(TILE):
                rows = multiply_add_rows(rows, weights, j, TILE, load(values, j * channels + c))
            add_rows(out, i * channels + c, channels, rows)


@njit
def _add_tiles(query, shift, keys, values, tiles, dims, sums, out, weights):
    """All keys of a list of tiles, from zero."""
    sums[:] = 0
    out[:] = 0
    for t in tiles:
        if values.shape[2] == 0:
            _add_weights(query, shift, keys[t], dims, sums)
        else:
            _add_values(query, shift, keys[t], values[t], dims, sums, out, weights)


@njit
def _aligned(size, dtype):
    """An empty array that starts where a cache line does: registers that straddle two lines load at half the speed."""
    array = np.empty(size + 64, dtype)
    skip = (-array.ctypes.data % 64) // array.itemsize
    return array[skip : skip + size]


def _compile(fingerprint):
    def attend_tiles(query, keys, values, first, last, tiles, begin, end, tiny, dims, lse, out):
        """Attention of the query tiles I = begin … end − 1, each to the key tiles tiles[first[I]:last[I]].

        query (T, TILE, d); keys (S, d + 1, TILE); values (S, TILE, C) with C a multiple of a register's lanes, 0 for
        lse alone; lse (T, TILE) in base 2 and out (T, TILE, C) are written. `dims` is a tuple of d items, which tells
        the compiler d, or empty.
        """
        fingerprint  # noqa: B018 (see below)
        sums = _aligned(TILE * lanes(query), query.dtype).reshape(TILE, lanes(query))
        weights = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
        shift = np.empty(TILE, query.dtype)
        for tile in range(begin, end):
            q, o, total = query[tile], out[tile], lse[tile]
            seen = tiles[first[tile] : last[tile]]
            _add_tiles(q, None, keys, values, seen, dims, sums, o, weights)
            shift[:] = 0
            low = False
            for i in range(TILE):
                total[i] = sums[i].sum()
                low |= not total[i] >= tiny
            if low:
                sums[:] = -np.inf
                for t in seen:
                    _add_maximum(q, keys[t], dims, sums)
                for i in range(TILE):
                    shift[i] = sums[i].max()
                _add_tiles(q, shift, keys, values, seen, dims, sums, o, weights)
                for i in range(TILE):
                    total[i] = sums[i].sum()
            for i in range(TILE):
                o[i] /= max(total[i], tiny)
                total[i] = math.log2(total[i]) + shift[i]

    try:
        return njit(nogil=True, cache=True, error_model="numpy")(attend_tiles)
    except RuntimeError:  # nowhere to keep it: every process compiles its own
        return njit(nogil=True, error_model="numpy")(attend_tiles)


# Numba's cache on disk is keyed by the file of the function itself and by its closure, not by what it calls or by
# constants of other files. So the closure holds a checksum of everything that is compiled in.
attend_tiles = _compile(zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in (_simd, native))))
