"""Selection of the key tiles that matter to a query tile, on a GPU.

The bounds are those of the loops for CPUs (`tiles.loops.cutoff`). In place of a walk down a tree, a program compares
its query tile with all key tiles of the cloud, which costs 64² times less than the attention to all keys.
"""

# mypy: disable-error-code="no-untyped-def,assignment"

import triton
import triton.language as tl

__all__ = ["list_near_tiles"]

SHARES = tl.constexpr(12.0)  # log₂ of the largest number of tiles among which the tolerance is divided


@triton.jit
def _decays(low, high, keys, key_tiles, j, is_key, scale, DIMS: tl.constexpr):
    """Bound the decay c ‖x − y‖² between a query tile and the key tiles j from below and from above."""
    gap = tl.zeros(j.shape, tl.float32)
    span = tl.zeros(j.shape, tl.float32)
    for d in tl.static_range(DIMS):
        key_low = tl.load(keys + d * key_tiles + j, mask=is_key, other=0.0)
        key_high = tl.load(keys + (DIMS + d) * key_tiles + j, mask=is_key, other=0.0)
        apart = tl.maximum(tl.maximum(low[d] - key_high, key_low - high[d]), 0.0)
        gap += apart * apart
        apart = tl.maximum(high[d] - key_low, key_high - low[d])
        span += apart * apart
    return scale * gap, scale * span


@triton.jit
def list_near_tiles(
    queries, keys, floors, tops, sums, scales, counts, lists, width, log_tol, query_tiles, key_tiles,
    DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of key tiles that matter to a query tile, and as many of their indices as fit its list.

    queries (B, 2 d, T) and keys (B, 2 d, S) are boxes (low, high); floors (B, T) are known lower bounds of row sums,
    tops (B, S) and sums (B, S) the weights of tiles with and without the sizes of values; all of them are in log₂.
    """
    program = tl.program_id(0)
    cloud = (program // query_tiles).to(tl.int64)
    keys, tops, sums = keys + cloud * 2 * DIMS * key_tiles, tops + cloud * key_tiles, sums + cloud * key_tiles
    scale, place = tl.load(scales + cloud), queries + cloud * 2 * DIMS * query_tiles + program % query_tiles
    low, high = (), ()
    for d in tl.static_range(DIMS):
        low = low + (tl.load(place + d * query_tiles),)
        high = high + (tl.load(place + (DIMS + d) * query_tiles),)

    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, key_tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        _, span = _decays(low, high, keys, key_tiles, j, j < key_tiles, scale, DIMS)
        largest = tl.maximum(largest, tl.load(sums + j, mask=j < key_tiles, other=-float("inf")) - span)
    floor = tl.maximum(tl.load(floors + program), tl.max(largest, 0))

    total = tl.zeros((BLOCK,), tl.float32)
    candidates = tl.zeros((BLOCK,), tl.float32)
    base = tl.where(floor == -float("inf"), 0.0, floor)  # a cloud without keys
    for start in range(0, key_tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        gap, span = _decays(low, high, keys, key_tiles, j, j < key_tiles, scale, DIMS)
        total += tl.exp2(tl.load(sums + j, mask=j < key_tiles, other=-float("inf")) - span - base)
        most = tl.load(tops + j, mask=j < key_tiles, other=-float("inf")) - gap
        candidates += tl.where(most > floor + log_tol - SHARES, 1.0, 0.0)
    shares = tl.minimum(tl.log2(tl.maximum(tl.sum(candidates, 0), 1.0)), SHARES)
    least = floor + tl.log2(tl.maximum(tl.sum(total, 0), 1.0)) + log_tol - shares

    count = 0
    lists += program.to(tl.int64) * width
    for start in range(0, key_tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        gap, _ = _decays(low, high, keys, key_tiles, j, j < key_tiles, scale, DIMS)
        is_near = (tl.load(tops + j, mask=j < key_tiles, other=-float("inf")) - gap > least).to(tl.int32)
        index = count + tl.cumsum(is_near, 0) - 1
        tl.store(lists + index, j, mask=(is_near > 0) & (index < width))
        count += tl.sum(is_near, 0)
    tl.store(counts + program, count)
