"""Gaussian attention over tiles of keys on a GPU, and sums of its derivatives.

Weights are 2^(c (β_j − ‖q_i − k_j‖²)) with one scale c per cloud and biases β, as in the loops for CPUs. Each costs d
differences of the original coordinates, d multiply-adds, a multiplication by c and one exp2.

Points are stored coordinate by coordinate, (clouds, d, points), and numbers of points are multiples of a tile: biases
of −inf fill the last one. A program computes a block of rows. It walks over the keys of its cloud in blocks, or over
the tiles of a list. If a list is longer than the memory for it, it walks over all keys.

Weights are first summed relative to the largest bias of the cloud, which needs no running maximum. Rows whose sum is
near the smallest float are computed again relative to their own largest exponent.

Lists of tiles have `width` places each. It is no constant, so that kernels are compiled once for all lists.

Tensor cores multiply weights and values. They take 11 bits of a factor, so both are split into a large part and a rest,
and all products but that of the rests are added: 22 bits. They also truncate sums, so that every block starts from 0.
The matrix cores of AMD take float32.

Where the rounding of lifted points is small enough, tensor cores compute the exponents too. Weights then have 16 bits,
as two parts of bfloat16, which has the range of float32: neither small weights nor small values underflow.
"""

# mypy: disable-error-code="no-untyped-def,assignment"

import math

import triton
import triton.language as tl

from qattn.tiles import sizes

__all__ = [
    "attend_blocks",
    "attend_lifted_blocks",
    "differentiate_blocks",
    "sum_blocks",
    "sum_lifted_blocks",
    "sum_values",
]

TILE = tl.constexpr(sizes.TILE)
LOG_2 = tl.constexpr(math.log(2))
# Keys per block in the second pass; few when values are present, because both passes share registers.
AGAIN = tl.constexpr(32)
VALUES_AGAIN = tl.constexpr(16)


@triton.jit
def _coordinates(points, size, index, DIMS: tl.constexpr):
    """Load some points as a tuple of coordinates."""
    x = ()
    for d in tl.static_range(DIMS):
        x = x + (tl.load(points + d * size + index),)
    return x


@triton.jit
def _num_keys(counts, tile, key_size, width):
    """Count the keys of a query tile."""
    if counts is not None:
        count = tl.load(counts + tile)
        key_size = tl.where(count <= width, count * TILE, key_size)
    return key_size


@triton.jit
def _block(lists, width, tile, start, num_keys, COLUMNS: tl.constexpr):
    """Return the indices of the keys of a block, the start-th of its list and the following ones."""
    if lists is not None:
        place = start // TILE
        listed = tl.load(lists + tile.to(tl.int64) * width + tl.minimum(place, width - 1))
        start += tl.where(num_keys <= width * TILE, listed - place, 0) * TILE
    return start + tl.arange(0, COLUMNS)


@triton.jit
def _exponent(query, shift, keys, beta, key_size, j, DIMS: tl.constexpr):
    """Compute β_j − ‖q_i − k_j‖² − shift_i."""
    s = tl.load(beta + j)[None, :]
    for d in tl.static_range(DIMS):
        x = query[d][:, None] - tl.load(keys + d * key_size + j)[None, :]
        s = s - x * x
    if shift is not None:  # last, so that the largest exponent is exactly 0, however far the keys are
        s = s - shift[:, None]
    return s


@triton.jit
def _largest(
    query, keys, beta, key_size, lists, width, tile, num_keys,
    DIMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the largest exponent of each row, 0 for rows without keys."""
    largest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for start in range(0, num_keys, COLUMNS):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        largest = tl.maximum(largest, _exponent(query, None, keys, beta, key_size, j, DIMS))
    top = tl.max(largest, 1)
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _sum(
    query, shift, scale, keys, beta, key_size, lists, width, tile, num_keys,
    DIMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the weights of each row. Sums cross lanes once, after the loop."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_keys, COLUMNS):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        total += tl.exp2(scale * _exponent(query, shift, keys, beta, key_size, j, DIMS))
    return tl.sum(total, 1)


@triton.jit
def _split(x):
    """Split x into a part of 11 bits, rounded to nearest, and the rest."""
    large = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def _product(a, b, PRODUCTS: tl.constexpr):
    """Multiply two matrices by one product in float32, or to 22 bits by three of tensor cores, two if b has 11 bits."""
    if PRODUCTS == 1:
        product = tl.dot(a, b, input_precision="ieee")
    else:  # Triton compiles what follows a return, and not all of AMD's GPUs have TF32
        a, a_rest = _split(a)
        if PRODUCTS == 2:
            product = tl.dot(a_rest, b, input_precision="tf32")
        else:
            b, b_rest = _split(b)
            product = tl.dot(a_rest, b, tl.dot(a, b_rest, input_precision="tf32"), input_precision="tf32")
        product = tl.dot(a, b, product, input_precision="tf32")
    return product


@triton.jit
def _sum_values(
    query, shift, scale, keys, beta, key_size, values, one, lists, width, tile, num_keys,
    DIMS: tl.constexpr, CHANNELS: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the weights of each row, and the weighted values."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    c = tl.arange(0, CHANNELS)
    for start in range(0, num_keys, COLUMNS):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        weights = tl.exp2(scale * _exponent(query, shift, keys, beta, key_size, j, DIMS))
        total += weights
        value = tl.load(values + j[:, None] * CHANNELS + c[None, :]).to(tl.float32)
        sums += one * _product(weights, value, PRODUCTS)  # times 1: else sums would be accumulated by tensor cores
    return tl.sum(total, 1), sums


@triton.jit
def _place(query_size, ROWS: tl.constexpr):
    """Return the cloud, rows and query tile of this program."""
    program, blocks = tl.program_id(0), query_size // ROWS
    cloud, block = program // blocks, program % blocks
    tile = cloud * (query_size // TILE) + block * ROWS // TILE
    return cloud.to(tl.int64), block * ROWS + tl.arange(0, ROWS), tile


@triton.jit
def sum_blocks(
    query, keys, beta, scales, tops, counts, lists, width, lse, tiny, query_size, key_size,
    DIMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute lse (B, N) for query (B, d, N), keys (B, d, M), beta (B, M), scales and tops (B)."""
    cloud, i, tile = _place(query_size, ROWS)
    keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
    q, scale = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS), tl.load(scales + cloud)
    num_keys = _num_keys(counts, tile, key_size, width)
    total = _sum(q, None, scale, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, COLUMNS)
    shift = tl.zeros((ROWS,), tl.float32)
    if tl.min(total, 0) < tiny:
        shift = _largest(q, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, COLUMNS)
        total = _sum(q, shift, scale, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, COLUMNS)
    tl.store(lse + cloud * query_size + i, (tl.log2(total) + scale * shift) * LOG_2 + tl.load(tops + cloud))


@triton.jit
def _exp2(x):
    """Compute 2^x to 2e-7 for x ≤ 127 by a polynomial on [−½, ½], with a fraction of the smallest float below −126."""
    x = tl.maximum(x, -126.0)
    shifted = x + 12582912.0  # 1.5 · 2²³: the last bits are the nearest integer
    f = x - (shifted - 12582912.0)
    p = f * 0.0013333558 + 0.0096181291
    p = p * f + 0.0555041087
    p = p * f + 0.2402265070
    p = p * f + 0.6931471806
    p = p * f + 1.0
    return (p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def sum_lifted_blocks(
    lifted_query, lifted_keys, constants, query, keys, beta, scales, tops, counts, lists, width, lse, tiny,
    query_size, key_size,
    DIMS: tl.constexpr, LIFTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute lse as `sum_blocks`, with exponents q̃_i · k̃_j + r_i by tensor cores.

    lifted_query (B, N, E) and lifted_keys (B, M, E) are in 16-bit parts, constants r (B, N). Sums of products start
    from the constants, which therefore cost nothing. Of each tile one block is left to the units that multiply and add:
    those that compute exp2 are the busiest. Rows that underflow are computed again from differences.
    """
    cloud, i, tile = _place(query_size, ROWS)
    e, num_keys = tl.arange(0, LIFTED), _num_keys(counts, tile, key_size, width)
    q = tl.load(lifted_query + (cloud * query_size + i)[:, None] * LIFTED + e[None, :])
    lifted_keys += cloud * key_size * LIFTED
    blocks = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = blocks + tl.load(constants + cloud * query_size + i)[:, None]
    for start in range(0, num_keys, TILE):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        for n in tl.static_range(TILE // COLUMNS):
            k = tl.load(lifted_keys + (n * COLUMNS + j)[None, :] * LIFTED + e[:, None])
            s = tl.dot(q, k, first)
            blocks += _exp2(s) if n == 0 else tl.exp2(s)
    total = tl.sum(blocks, 1)
    shift, scale = tl.zeros((ROWS,), tl.float32), tl.load(scales + cloud)
    if tl.min(total, 0) < tiny:
        keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
        x = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS)
        shift = _largest(x, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, AGAIN)
        total = _sum(x, shift, scale, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, AGAIN)
    tl.store(lse + cloud * query_size + i, (tl.log2(total) + scale * shift) * LOG_2 + tl.load(tops + cloud))


@triton.jit
def attend_blocks(
    query, keys, beta, scales, tops, values, one, counts, lists, width, lse, out, tiny, clouds, query_size, key_size,
    DIMS: tl.constexpr, CHANNELS: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute lse as `sum_blocks`, and out (chunks, B, N, C) for values (chunks, B, M, C)."""
    cloud, i, tile = _place(query_size, ROWS)
    keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
    chunk = tl.program_id(1).to(tl.int64) * clouds + cloud
    values, out = values + chunk * key_size * CHANNELS, out + chunk * query_size * CHANNELS
    q, scale = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS), tl.load(scales + cloud)
    num_keys = _num_keys(counts, tile, key_size, width)
    total, sums = _sum_values(
        q, None, scale, keys, beta, key_size, values, one, lists, width, tile, num_keys,
        DIMS, CHANNELS, PRODUCTS, ROWS, COLUMNS,
    )  # fmt: skip
    shift = tl.zeros((ROWS,), tl.float32)
    if tl.min(total, 0) < tiny:
        shift = _largest(q, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, COLUMNS)
        total, sums = _sum_values(
            q, shift, scale, keys, beta, key_size, values, one, lists, width, tile, num_keys,
            DIMS, CHANNELS, PRODUCTS, ROWS, COLUMNS,
        )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(lse + cloud * query_size + i, (tl.log2(total) + scale * shift) * LOG_2 + tl.load(tops + cloud))
    mean = sums / tl.maximum(total, tiny)[:, None]
    tl.store(out + i[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], mean)


@triton.jit
def _add_values(
    blocks, sums, weights, parts, size, one, j, CHANNELS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    """Add weights, rounded to 16 bits, and the values that they weigh, both as sums of parts of bfloat16."""
    bits = (weights.to(tl.int32, bitcast=True) + 0x80) & -0x100
    weights, large = bits.to(tl.float32, bitcast=True), (bits & -0x10000).to(tl.float32, bitcast=True)
    large, rest = large.to(tl.bfloat16), (weights - large).to(tl.bfloat16)
    place = parts + j[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    product = tl.zeros((ROWS, CHANNELS), tl.float32)
    for n in tl.static_range(PARTS - 1, -1, -1):  # small products first
        value = tl.load(place + n * size)
        if n < 2:
            product = tl.dot(rest, value, product)
        product = tl.dot(large, value, product)
    return blocks + weights, sums + one * product  # times 1: else sums would be accumulated by tensor cores


@triton.jit
def attend_lifted_blocks(
    lifted_query, lifted_keys, constants, query, keys, beta, scales, tops, parts, one, counts, lists, width, lse, out,
    tiny, clouds, query_size, key_size,
    DIMS: tl.constexpr, LIFTED: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute lse and out as `attend_blocks`, with exponents as `sum_lifted_blocks` and weights of 16 bits.

    Values are the sums of their parts (chunks, B, parts, M, C) in bfloat16. Sums of weights are those of the rounded
    ones, so that averages of constants are constants.
    """
    cloud, i, tile = _place(query_size, ROWS)
    chunk, size = tl.program_id(1).to(tl.int64) * clouds + cloud, key_size.to(tl.int64) * CHANNELS
    parts, out = parts + chunk * PARTS * size, out + chunk * query_size * CHANNELS
    e, num_keys = tl.arange(0, LIFTED), _num_keys(counts, tile, key_size, width)
    lifted = tl.load(lifted_query + (cloud * query_size + i)[:, None] * LIFTED + e[None, :])
    lifted_keys += cloud * key_size * LIFTED
    blocks = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    first = blocks + tl.load(constants + cloud * query_size + i)[:, None]
    for start in range(0, num_keys, COLUMNS):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        weights = tl.exp2(tl.dot(lifted, tl.load(lifted_keys + j[None, :] * LIFTED + e[:, None]), first))
        blocks, sums = _add_values(blocks, sums, weights, parts, size, one, j, CHANNELS, PARTS, ROWS)
    total = tl.sum(blocks, 1)
    shift, scale = tl.zeros((ROWS,), tl.float32), tl.load(scales + cloud)
    if tl.min(total, 0) < tiny:
        keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
        x = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS)
        shift = _largest(x, keys, beta, key_size, lists, width, tile, num_keys, DIMS, ROWS, VALUES_AGAIN)
        again = tl.zeros((ROWS, VALUES_AGAIN), tl.float32)
        sums = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, num_keys, VALUES_AGAIN):
            j = _block(lists, width, tile, start, num_keys, VALUES_AGAIN)
            weights = tl.exp2(scale * _exponent(x, shift, keys, beta, key_size, j, DIMS))
            again, sums = _add_values(again, sums, weights, parts, size, one, j, CHANNELS, PARTS, ROWS)
        total = tl.sum(again, 1)
    if tl.program_id(1) == 0:
        tl.store(lse + cloud * query_size + i, (tl.log2(total) + scale * shift) * LOG_2 + tl.load(tops + cloud))
    tl.store(out + i[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], sums / tl.maximum(total, tiny)[:, None])


@triton.jit
def sum_values(
    query, shifts, keys, beta, scales, values, one, counts, lists, width, out, clouds, query_size, key_size,
    DIMS: tl.constexpr, CHANNELS: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute Σ_j 2^(c (β_j − ‖q_i − k_j‖² − shift_i)) v_j, (chunks, B, N, C), for shifts (B, N)."""
    cloud, i, tile = _place(query_size, ROWS)
    keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
    chunk = tl.program_id(1).to(tl.int64) * clouds + cloud
    values, out = values + chunk * key_size * CHANNELS, out + chunk * query_size * CHANNELS
    q, scale = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS), tl.load(scales + cloud)
    num_keys = _num_keys(counts, tile, key_size, width)
    _, sums = _sum_values(
        q, tl.load(shifts + cloud * query_size + i), scale, keys, beta, key_size, values, one, lists, width, tile,
        num_keys, DIMS, CHANNELS, PRODUCTS, ROWS, COLUMNS,
    )  # fmt: skip
    tl.store(out + i[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], sums)


@triton.jit
def differentiate_blocks(
    query, shifts, keys, beta, scales, rows, columns, counts, lists, width, sums, chunks, clouds, query_size, key_size,
    DIMS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, CHANNELS: tl.constexpr, PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute Σ_j s̄_ij (1, ‖k_j − q_i‖², k_j − q_i), s̄_ij = 2^(c (β_j − ‖q_i − k_j‖² − shift_i)) R_i · S_j.

    shifts (B, N), rows R (chunks, B, N, C), columns S (chunks, B, M, C); sums (B, 2 + d, N), of which the coordinates
    FIRST … LAST − 1 are written, and the first two sums if FIRST is 0.
    """
    cloud, i, tile = _place(query_size, ROWS)
    keys, beta = keys + cloud * DIMS * key_size, beta + cloud * key_size
    q, scale = _coordinates(query + cloud * DIMS * query_size, query_size, i, DIMS), tl.load(scales + cloud)
    shift = tl.load(shifts + cloud * query_size + i)
    num_keys = _num_keys(counts, tile, key_size, width)
    c = tl.arange(0, CHANNELS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = ()
    for _ in tl.static_range(LAST - FIRST):
        first = first + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for start in range(0, num_keys, COLUMNS):
        j = _block(lists, width, tile, start, num_keys, COLUMNS)
        cotangent = tl.zeros((ROWS, COLUMNS), tl.float32)
        for n in range(chunks):
            chunk = n * clouds + cloud
            r = tl.load(rows + (chunk * query_size + i)[:, None] * CHANNELS + c[None, :])
            s = tl.load(columns + (chunk * key_size + j)[None, :] * CHANNELS + c[:, None])
            cotangent += _product(r, s, PRODUCTS)
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for d in tl.static_range(DIMS):
            x = tl.load(keys + d * key_size + j)[None, :] - q[d][:, None]
            square += x * x
        cotangent *= tl.exp2(scale * (tl.load(beta + j)[None, :] - square - shift[:, None]))
        total += cotangent
        second += cotangent * square
        added = ()
        for d in tl.static_range(FIRST, LAST):
            x = tl.load(keys + d * key_size + j)[None, :] - q[d][:, None]
            added = added + (first[d - FIRST] + cotangent * x,)
        first = added
    place = sums + cloud * (2 + DIMS) * query_size + i
    if FIRST == 0:
        tl.store(place, tl.sum(total, 1))
        tl.store(place + query_size, tl.sum(second, 1))
    for d in tl.static_range(FIRST, LAST):
        tl.store(place + (2 + d) * query_size, tl.sum(first[d - FIRST], 1))
