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
from qattn.tiles.loops.cutoff import PARTS, near_parts, near_tiles, parts_in_reach, tiles_in_reach
from qattn.tiles.loops.simd import (
    FEW,
    ROWS,
    add,
    add_differences_few,
    add_few,
    add_products_rows,
    add_rows,
    add_squares_rows,
    exp2_of_product,
    lanes,
    load,
    maximum,
    minus_square,
    multiply,
    multiply_add,
    multiply_add_registers,
    multiply_add_rows,
    splat,
    splat_few,
    splat_rows,
    store,
    store_rows,
    subtract,
    sum_of,
    zero_few,
    zero_rows,
)
from qattn.tiles.sizes import PART, TILE

__all__ = ["attend_tiles", "differentiate_tiles", "sum_tiles"]

_LOG_2 = math.log(2)
_BLOCK = 64  # tiles of keys whose weights are summed apart before they are added to the total
_AT_ONCE = 32  # parts of keys whose weights are kept, in the first level of the cache


# Tiles of keys are passed as an index t, not as slices: counting references to a slice would cost as much as a hundred
# weights.


@njit(forceinline=True)
def _exponent(query, i, shift, keys, beta, t, j, dims):
    """Compute β_j − ‖q_i − k_j‖² − shift_i for one register of keys of tile t, in few dimensions."""
    d = len(dims)
    s = load(beta, t * TILE + j)
    for c in range(d):
        s = minus_square(s, load(keys, (t * d + c) * TILE + j), splat(query[i, c]))
    if shift is not None:  # last, so that the largest exponent is exactly 0, however far the keys are
        s = add(s, splat(-shift[i]))
    return s


@njit(forceinline=True)
def _store_squares(query, first, keys, t, begin, end, squares):
    """Write ‖q_i − k_j‖² for ROWS rows from `first` on, and the keys begin … end − 1 of tile t, to (ROWS, TILE)."""
    d = query.shape[1]
    for j in range(begin, end, lanes(squares)):
        rows = zero_rows(squares)
        for c in range(d):
            rows = add_squares_rows(rows, query, first * d + c, d, load(keys, (t * d + c) * TILE + j))
        store_rows(squares, j, TILE, rows)


@njit(forceinline=True)
def _add_maximum(query, keys, beta, t, dims, largest, squares):
    """Update the largest exponents of all rows of a query tile by one tile of keys, lane by lane."""
    width = lanes(largest)
    for i in range(TILE):
        if len(dims) == 0 and i % ROWS == 0:
            _store_squares(query, i, keys, t, 0, TILE, squares)
        m = load(largest, i * width)
        for j in range(0, TILE, width):
            if len(dims) == 0:
                m = maximum(m, subtract(load(beta, t * TILE + j), load(squares, i % ROWS * TILE + j)))
            else:
                m = maximum(m, _exponent(query, i, None, keys, beta, t, j, dims))
        store(largest, i * width, m)


@njit(forceinline=True)
def _add_weights(query, first, rows, shift, scale, keys, beta, t, begin, end, dims, sums, weights):
    """Add the weights of the keys begin … end − 1 of tile t to rows of sums, lane by lane; store them in `weights`."""
    width, factor = lanes(sums), splat(scale)
    if len(dims) == 0:
        _store_squares(query, first, keys, t, begin, end, weights)
    for r in range(rows):
        i = first + r
        total = load(sums, i * width)
        for j in range(begin, end, width):
            if len(dims) == 0:
                s = subtract(load(beta, t * TILE + j), load(weights, r * TILE + j))
                if shift is not None:
                    s = add(s, splat(-shift[i]))
            else:
                s = _exponent(query, i, shift, keys, beta, t, j, dims)
            w = exp2_of_product(factor, s)
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
def _add_few_products(weights, values, t, begin, end, i, out):
    """Add as `_add_products` does for few channels, lane by lane: values (S, C, TILE), out (TILE, C · lanes)."""
    channels, width = values.shape[1], lanes(out)
    for r in range(ROWS):
        for c in range(channels):
            total = splat(out.dtype.type(0))
            for j in range(begin, end, width):
                total = multiply_add(load(weights, r * TILE + j), load(values, (t * channels + c) * TILE + j), total)
            place = ((i + r) * channels + c) * width
            store(out, place, add(load(out, place), total))


@njit(forceinline=True)
def _add_keys(query, first, rows, shift, scale, keys, beta, values, few, t, begin, end, dims, sums, out, weights):
    """Add weights to sums and, if there are values, weighted values to out."""
    if values.size == 0 and len(dims) > 0:
        _add_weights(query, first, rows, shift, scale, keys, beta, t, begin, end, dims, sums, None)
        return
    for i in range(first, first + rows, ROWS):
        _add_weights(query, i, ROWS, shift, scale, keys, beta, t, begin, end, dims, sums, weights)
        if few:
            _add_few_products(weights, values, t, begin, end, i, out)
        else:
            _add_products(weights, values, t, begin, end, i, out)


@njit
def _add_all(query, shift, scale, keys, beta, values, few, tiles, dims, sums, out, weights):
    """Add the weights of all keys of a list of tiles."""
    for t in tiles:
        _add_keys(query, 0, TILE, shift, scale, keys, beta, values, few, t, 0, TILE, dims, sums, out, weights)


@njit
def _add_near(query, tile, shift, scale, keys, beta, values, few, tiles, cutoff, least, near, dims, sums, out, weights):
    """Add, for each part of the query tile, the weights of key parts that contribute more than `least`."""
    for p in range(PARTS):
        first, count = p * PART, near_parts(tile * PARTS + p, tiles, cutoff, least, near)
        if few and len(dims) > 0:
            for i in range(first, first + PART, ROWS):
                for n in range(0, count, _AT_ONCE):
                    some = near[n : min(n + _AT_ONCE, count)]
                    _add_near_rows(query, i, shift, scale, keys, beta, values, some, dims, sums, out, weights)
            continue
        for n in range(count):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            end = begin + PART
            _add_keys(
                query, first, PART, shift, scale, keys, beta, values, few, t, begin, end, dims, sums, out, weights
            )


@njit
def _add_blocks(
    query, tile, shift, scale, keys, beta, values, few, tiles, cutoff, least, near, dims, sums, out, blocks, weights
):
    """Sum over the keys that matter of a list of tiles.

    Weights of `_BLOCK` tiles are first summed in `blocks`: a million weights, added one by one to a large sum, would
    lose three digits in float32.
    """
    block_sums, block_out = blocks
    sums[:] = 0
    out[:] = 0
    for start in range(0, len(tiles), _BLOCK):
        some = tiles[start : start + _BLOCK]
        block_sums[:] = 0
        block_out[:] = 0
        if cutoff is None:
            _add_all(query, shift, scale, keys, beta, values, few, some, dims, block_sums, block_out, weights)
        else:
            _add_near(
                query, tile, shift, scale, keys, beta, values, few, some, cutoff, least, near, dims,
                block_sums, block_out, weights,
            )  # fmt: skip
        sums += block_sums
        out += block_out


@njit(forceinline=True)
def _add_near_rows(query, first, shift, scale, keys, beta, values, near, dims, sums, out, weights):
    """Add the weights of parts of key tiles to ROWS rows of sums, and few channels of weighted values to out.

    weights (ROWS, PART · len(near)) is a buffer. With all weights of a row at hand, each sum stays in a register.
    """
    width, channels, factor = lanes(sums), values.shape[1], splat(scale)
    stride = PART * len(near)
    for r in range(ROWS):
        i = first + r
        total = load(sums, i * width)
        for n in range(len(near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            for j in range(0, PART, width):
                weight = exp2_of_product(factor, _exponent(query, i, shift, keys, beta, t, begin + j, dims))
                total = add(total, weight)
                store(weights, r * stride + n * PART + j, weight)
        store(sums, i * width, total)
    for c in range(channels):
        rows = zero_rows(out)
        for n in range(len(near)):
            t, begin = near[n] // PARTS, near[n] % PARTS * PART
            for j in range(0, PART, width):
                value = load(values, (t * channels + c) * TILE + begin + j)
                rows = multiply_add_registers(rows, weights, n * PART + j, stride, value)
        add_rows(out, (first * channels + c) * width, channels * width, rows)


@njit(forceinline=True)
def _aligned(size, dtype):
    """Allocate an array aligned to a cache line: registers across two lines load at half the speed."""
    array = np.empty(size + 64, dtype)
    skip = (-array.ctypes.data % 64) // array.itemsize
    return array[skip : skip + size]


@compiled
def attend_tiles(
    query, order, scales, keys, beta, tops, values, key_tiles, cutoff, tiny, dims, few, lse, out, begin, end
):
    """Attention of the query tiles begin … end − 1 to the tiles of keys that matter, or to all of their cloud.

    query (T, TILE, d), in tiles of an order (B, N); scales (B,); keys (S, d, TILE), beta (S, TILE)
    and tops (B, 1); values (S, TILE, W) with W a multiple of the lanes of a register, 0 for lse alone, or (S, C, TILE)
    if there are few channels; key_tiles (T, 2), the range of key tiles of the cloud of each query tile. lse (B, N) and
    out (B, N, C), C ≤ W, are written in the order of the cloud. `dims` is a tuple of d items, so that d is a constant
    to the compiler, or empty.
    """
    sums = _aligned(TILE * lanes(query), query.dtype).reshape(TILE, lanes(query))
    weights = _aligned(ROWS * PART * _AT_ONCE, query.dtype).reshape(ROWS, PART * _AT_ONCE)
    shift, total = np.empty(TILE, query.dtype), np.empty(TILE, query.dtype)
    channels = out.shape[2] * lanes(query) if few else values.shape[2]
    o = _aligned(TILE * channels, query.dtype).reshape(TILE, channels)
    blocks = _aligned(sums.size, query.dtype).reshape(sums.shape), _aligned(o.size, query.dtype).reshape(o.shape)
    seen, near = np.empty(len(keys), np.int64), np.empty(PARTS * len(keys), np.int64)
    most, smallest = np.empty(len(keys), query.dtype), np.empty(len(keys), query.dtype)
    least = query.dtype.type(0)
    for tile in range(begin, end):
        cloud = tile * len(scales) // len(query)
        q, scale, first = query[tile], scales[cloud], (tile - cloud * (len(query) // len(scales))) * TILE
        if cutoff is None:
            tiles = np.arange(key_tiles[tile, 0], key_tiles[tile, 1])
        else:
            count, least = near_tiles(tile, cutoff, seen, most, smallest)
            tiles = seen[:count]
        _add_blocks(
            q, tile, None, scale, keys, beta, values, few, tiles, cutoff, least, near, dims, sums, o, blocks, weights
        )
        shift[:] = 0
        low = False
        for i in range(TILE):
            total[i] = sum_of(load(sums, i * lanes(sums)))
            low |= not total[i] >= tiny
        if low:
            sums[:] = -np.inf
            for t in tiles:
                _add_maximum(q, keys, beta, t, dims, sums, weights)
            for i in range(TILE):
                shift[i] = sums[i].max()
            _add_blocks(
                q, tile, shift, scale, keys, beta, values, few, tiles, cutoff, least, near, dims, sums, o, blocks,
                weights,
            )  # fmt: skip
            for i in range(TILE):
                total[i] = sum_of(load(sums, i * lanes(sums)))
        for i in range(min(TILE, order.shape[1] - first)):
            row, norm = order[cloud, first + i], max(total[i], tiny)
            lse[cloud, row] = (math.log2(total[i]) + scale * shift[i]) * _LOG_2 + tops[cloud, 0]
            for c in range(out.shape[2]):
                product = sum_of(load(o, i * channels + c * lanes(o))) if few else o[i, c]
                out[cloud, row, c] = product / norm


@njit(forceinline=True)
def _add_both_sides(query, tile, first, factor, keys, weights, t, begin, is_own, dims, rowwise, columnwise):
    """Add 2^(−c ‖q_i − k_j‖²) times weights, of a part of the queries and one of the keys, to the sums of both.

    rowwise (PART, lanes) has sums over keys, lane by lane, and columnwise (S, TILE) sums over queries. A part and
    itself count once, in rowwise.
    """
    d, width, zero = len(dims), lanes(rowwise), query.dtype.type(0)
    for j in range(begin, begin + PART, width):
        weight, total = load(weights, t * TILE + j), splat(zero)
        for i in range(PART):
            s = splat(zero)
            for c in range(d):
                s = minus_square(s, load(keys, (t * d + c) * TILE + j), splat(query[tile, first + i, c]))
            power = exp2_of_product(factor, s)
            store(rowwise, i * width, multiply_add(power, weight, load(rowwise, i * width)))
            total = multiply_add(power, splat(weights[tile, first + i]), total)
        if not is_own:
            store(columnwise, t * TILE + j, add(load(columnwise, t * TILE + j), total))


@compiled
def sum_tiles(query, scales, keys, weights, cutoff, reach, dims, rowwise, columnwise, begin, end, first, last):
    """Add Σ_j 2^(−c ‖x_i − x_j‖²) w_j over pairs of the tiles begin … end − 1 and first … last − 1, each taken once.

    Both ranges are nodes of the tree of one cloud that attends to itself: the same one, or two without a common tile.
    rowwise (T, TILE) has the sums of the first range, columnwise (T, TILE) the sums of the second. The same points are
    query (T, TILE, d) and keys (T, d, TILE), with weights w (T, TILE). `dims` has d > 0 items.
    """
    width = lanes(query)
    sums = _aligned(PART * width, query.dtype).reshape(PART, width)
    seen, near = np.empty(last - first, np.int64), np.empty(PARTS * (last - first), np.int64)
    for tile in range(begin, end):
        factor = splat(scales[tile * len(scales) // len(query)])
        count = 0
        for n in range(tiles_in_reach(tile, cutoff, reach, first, last, seen)):
            seen[count] = seen[n]
            count += begin != first or seen[n] >= tile
        for part in range(tile * PARTS, (tile + 1) * PARTS):
            num_parts = parts_in_reach(part, seen[:count], cutoff, reach, near)
            start = part % PARTS * PART
            sums[:] = 0
            for n in range(num_parts):
                t, place, is_own = near[n] // PARTS, near[n] % PARTS * PART, near[n] == part
                if near[n] >= part or begin != first:
                    _add_both_sides(query, tile, start, factor, keys, weights, t, place, is_own, dims, sums, columnwise)
            for i in range(PART):
                rowwise[tile, start + i] += sum_of(load(sums, i * width))


@njit(forceinline=True)
def _cotangents(query, first, shift, scale, rows, keys, beta, columns, t, begin, end, weights, cotangents, sums):
    """Write weights p and cotangents p R · S of ROWS rows and the keys begin … end − 1 of tile t; add them to sums.

    weights and cotangents are (ROWS, TILE); of the sums (ROWS, d + 2, lanes) only the first and the last change.
    """
    width, channels, d, factor = lanes(sums), columns.shape[1], query.shape[1], splat(scale)
    _store_squares(query, first, keys, t, begin, end, weights)
    for j in range(begin, end, width):
        products = zero_rows(sums)
        for c in range(channels):
            column = load(columns, (t * channels + c) * TILE + j)
            products = multiply_add_rows(products, rows, first * channels + c, channels, column)
        store_rows(cotangents, j, TILE, products)
    for r in range(ROWS):
        place, s = r * (d + 2) * width, splat(shift[first + r])
        total, second = load(sums, place), load(sums, place + (d + 1) * width)
        for j in range(begin, end, width):
            square = load(weights, r * TILE + j)
            weight = exp2_of_product(factor, subtract(subtract(load(beta, t * TILE + j), square), s))
            cotangent = multiply(weight, load(cotangents, r * TILE + j))
            store(weights, r * TILE + j, weight)
            store(cotangents, r * TILE + j, cotangent)
            total, second = add(total, cotangent), multiply_add(cotangent, square, second)
        store(sums, place, total)
        store(sums, place + (d + 1) * width, second)


@njit(forceinline=True)
def _add_derivatives(query, first, rows, keys, t, begin, end, by_points, weights, cotangents, sums, columnwise, values):
    """Add derivatives of ROWS rows and the keys begin … end − 1 of tile t to sums over keys and over queries.

    columnwise (S, d + 1, TILE) has the sums of cotangents, and of cotangents times differences; values (S, C, TILE).
    Either of them may be empty, (0, …).
    """
    width, channels, d = lanes(sums), rows.shape[1], query.shape[1]
    for c in range(d if by_points else 0):
        for r in range(0, ROWS, FEW):
            few, others = zero_few(sums), splat_few(query, (first + r) * d + c, d)
            for j in range(begin, end, width):
                place = (t * (d + 1) + c + 1) * TILE + j
                total = splat(query.dtype.type(0)) if len(columnwise) == 0 else load(columnwise, place)
                key = load(keys, (t * d + c) * TILE + j)
                few, total = add_differences_few(few, total, others, key, cotangents, r * TILE + j, TILE)
                if len(columnwise) > 0:
                    store(columnwise, place, total)
            add_few(sums, (r * (d + 2) + c + 1) * width, (d + 2) * width, few)
    for c in range(values.shape[1] if len(values) > 0 else 0):
        factors = splat_rows(rows, first * channels + c, channels)
        for j in range(begin, end, width):
            place = (t * values.shape[1] + c) * TILE + j
            total = add_products_rows(splat(query.dtype.type(0)), factors, weights, j, TILE)
            store(values, place, add(load(values, place), total))
    for j in range(begin, end if len(columnwise) > 0 else begin, width):
        total = load(cotangents, j)
        for r in range(1, ROWS):
            total = add(total, load(cotangents, r * TILE + j))
        place = t * (d + 1) * TILE + j
        store(columnwise, place, add(load(columnwise, place), total))


@compiled
def differentiate_tiles(
    query, scales, shift, rows, keys, beta, columns, cutoff, reach, by_points, rowwise, columnwise, values,
    begin, end, first, last,
):  # fmt: skip
    """Add the derivatives of the query tiles begin … end − 1 and the key tiles first … last − 1 to sums over pairs.

    With p_ij = 2^(c (β_j − ‖q_i − k_j‖² − shift_i)) and s̄_ij = p_ij R_i · S_j, they are

        rowwise (T, TILE, d + 2)        Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²),
        columnwise (S, d + 1, TILE)     Σ_i s̄_ij (1, k_j − q_i),
        values (S, C′, TILE)            Σ_i p_ij R_i, of the first C′ channels.

    query (T, TILE, d), shift (T, TILE) and rows R (T, TILE, C); keys (S, d, TILE), beta (S, TILE) and columns S
    (S, C, TILE). columnwise and values may be empty. With a cut-off, the key tiles should be a node of their tree.
    """
    d, width = query.shape[2], lanes(query)
    sums = _aligned(ROWS * (d + 2) * width, query.dtype).reshape(ROWS, d + 2, width)
    weights = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
    cotangents = _aligned(ROWS * TILE, query.dtype).reshape(ROWS, TILE)
    seen, near = np.empty(last - first, np.int64), np.empty(PARTS * (last - first), np.int64)
    for tile in range(begin, end):
        q, r, s = query[tile], rows[tile], shift[tile]
        scale = scales[tile * len(scales) // len(query)]
        count = 0
        if cutoff is not None:
            count = tiles_in_reach(tile, cutoff, reach, first, last, seen)
        for p in range(PARTS):
            num_parts = 0
            if cutoff is not None:
                num_parts = parts_in_reach(tile * PARTS + p, seen[:count], cutoff, reach, near)
                if num_parts == 0:
                    continue
            for i in range(p * PART, (p + 1) * PART, ROWS):
                sums[:] = 0
                if cutoff is None:
                    for t in range(first, last):
                        _cotangents(q, i, s, scale, r, keys, beta, columns, t, 0, TILE, weights, cotangents, sums)
                        _add_derivatives(
                            q, i, r, keys, t, 0, TILE, by_points, weights, cotangents, sums, columnwise, values
                        )
                for n in range(num_parts):
                    t, start = near[n] // PARTS, near[n] % PARTS * PART
                    stop = start + PART
                    _cotangents(q, i, s, scale, r, keys, beta, columns, t, start, stop, weights, cotangents, sums)
                    _add_derivatives(
                        q, i, r, keys, t, start, stop, by_points, weights, cotangents, sums, columnwise, values
                    )
                for row in range(ROWS):
                    for n in range(d + 2):
                        rowwise[tile, i + row, n] += sum_of(load(sums, (row * (d + 2) + n) * width))
