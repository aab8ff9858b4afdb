"""Gaussian attention between two clouds in tiles, and sums of its derivatives over pairs."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives
from qattn.ranks import ALONE, Ranks
from qattn.tiles.threads import chunks, share
from qattn.tiles.tiling import FACTOR, TILE, Tiling

if TYPE_CHECKING:
    from qattn.tiles.loops.cutoff import GaussianCutoff

__all__ = ["attend", "count_near", "differentiate", "excess", "near_tiles"]

_UNROLLED = 4  # largest dimension with a loop compiled for it
# Pairs of points per task of a thread: the least pays for the overhead, the most keeps threads equally busy.
_MIN_PAIRS, _MAX_PAIRS = 2**21, 2**22
_CHUNKS = 16  # tasks per thread, where the number of pairs is not known


def attend(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    tol: float | None = None,
) -> Attended:
    """Attend with the scores −‖q − k‖² / 2σ² + b.

    Args:
        query: Clouds that attend.
        key: Clouds attended to; the same object if clouds attend to themselves.
        sigma: Bandwidths (B,); 1 if None.
        value: Values (B, M, C) in the order of the clouds, or None for lse alone.
        bias: Biases (B, M), 0 if None.
        tol: Fraction of the sum of a row, and of the sum of the sizes of its values, that may be left out; None to
            compute all pairs.
    """
    from qattn.tiles.loops import gaussian, simd  # here, because importing Numba takes a while

    B, M, dtype = query.clouds, key.size, query.points.dtype
    bias = torch.zeros(B, M, dtype=dtype) if bias is None else bias.to(dtype)
    beta, top = key.to_base_2(bias)
    scale = _scale(query, sigma)

    C = 0 if value is None else value.shape[-1]
    lanes = simd.REGISTER_BYTES // dtype.itemsize
    channels = -(-C // lanes) * lanes
    values = torch.zeros(B, key.tiles * TILE, channels, dtype=dtype)
    if value is not None:
        values[:, :M, :C] = key.sort(value.to(dtype))
    values = values.reshape(B * key.tiles, TILE, channels)
    lse = torch.empty(B * query.tiles, TILE, dtype=dtype)
    out = torch.empty(B * query.tiles, TILE, channels, dtype=dtype)

    cutoff = None
    if tol is not None:
        by_value = None if value is None else key.to_base_2(bias + excess(value, bias), top)[0]
        cutoff = _cutoff(query, key, scale, beta, tol, by_value)
    # Row sums above it are not affected by weights that count as 0.
    tiny = M * 2.0 ** simd.LOWEST[8 * dtype.itemsize] / torch.finfo(dtype).eps
    key_tiles = _tiles_of_clouds(query, key, bias)
    arrays = [x.numpy() for x in (query.points, scale, key.columns, _per_cloud(beta, 1 / scale), values, key_tiles)]
    run = partial(gaussian.attend_tiles, *arrays, cutoff, tiny, _unrolled(query), lse.numpy(), out.numpy())
    share(run, _chunks(key_tiles, is_limited=tol is not None))
    lse = query.untiled(lse) * math.log(2) + top
    if value is None:
        return Attended(None, lse)
    return Attended(query.untiled(out[..., :C]).to(value.dtype), lse)


def differentiate(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    shift: Tensor,
    tol: float | None = None,
) -> Derivatives:
    """Compute Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) with s̄_ij = exp(s_ij − shift_i) R_i · S_j.

    Args:
        query: Clouds that attend.
        key: Clouds attended to.
        sigma: Bandwidths (B,); 1 if None.
        row: Rows R (B, N, C).
        column: Columns S (B, M, C).
        bias: Biases (B, M) of the scores s, 0 if None.
        shift: Shifts (B, N).
        tol: Fraction of Σ_j p_ij |S_j| that may be left out; None to compute all pairs.
    """
    from qattn.tiles.loops import gaussian  # here, because importing Numba takes a while

    B, dtype = query.clouds, query.points.dtype
    bias = torch.zeros(B, key.size, dtype=dtype) if bias is None else bias.to(dtype)
    beta, top = key.to_base_2(bias)
    scale = _scale(query, sigma)
    rows, columns = query.tiled(row.to(dtype)).contiguous(), key.tiled(column.to(dtype))
    shifts = _per_cloud(query.tiled((shift.to(dtype) - top) / math.log(2)), 1 / scale)
    result = torch.empty(len(rows), TILE, query.dims + 2, dtype=dtype)

    cutoff = None
    if tol is not None:
        cutoff = _cutoff(query, key, scale, beta + torch.log2(columns.abs().amax(-1)), tol)
    key_tiles = _tiles_of_clouds(query, key, bias)
    tensors = query.points, scale, shifts, rows, key.columns, _per_cloud(beta, 1 / scale), columns.mT.contiguous()
    arrays = [x.numpy() for x in (*tensors, key_tiles)]
    run = partial(gaussian.differentiate_tiles, *arrays, cutoff, _unrolled(query), result.numpy())
    share(run, _chunks(key_tiles, is_limited=tol is not None))
    total, first, second = query.untiled(result).split([1, query.dims, 1], dim=-1)
    return Derivatives(total[..., 0], first, second[..., 0])


def near_tiles(query: Tiling, key: Tiling, sigma: Tensor | None, bias: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """List the key tiles that matter to each query tile, numbered within their cloud.

    Returns:
        Counts (B, T) and lists (B, T, width), int32; the width is a power of two, or the number of key tiles.
    """
    from qattn.tiles.loops.cutoff import list_near_tiles  # here, because importing Numba takes a while

    cutoff = _cutoff(query, key, _scale(query, sigma), key.to_base_2(bias.detach().cpu())[0], tol)
    counts = torch.empty(query.clouds * query.tiles, dtype=torch.int64)
    list_near_tiles(cutoff, counts.numpy(), torch.empty(len(counts), 0, dtype=torch.int64).numpy())
    longest = max(1, int(counts.amax()))
    width = min(key.tiles, 1 << (longest - 1).bit_length())  # few different widths, as kernels are compiled for each
    lists = torch.zeros(len(counts), width, dtype=torch.int64)
    list_near_tiles(cutoff, counts.numpy(), lists.numpy())
    first = key.tiles * torch.arange(query.clouds).repeat_interleave(query.tiles)
    lists = torch.where(torch.arange(width) < counts[:, None], lists - first[:, None], 0)
    shape = query.clouds, query.tiles
    return counts.reshape(shape).int(), lists.reshape(*shape, width).int()


def count_near(query: Tiling, key: Tiling, sigma: float, tol: float, num_samples: int) -> tuple[float, float]:
    """Estimate the numbers of near pairs of tiles, and of pairs of points in near parts of them, for equal biases."""
    from qattn.tiles.loops import cutoff as walk  # here, because importing Numba takes a while

    dtype = query.points.dtype
    beta = key.to_base_2(torch.zeros(key.clouds, key.size, dtype=dtype))[0]
    cutoff = _cutoff(query, key, _scale(query, torch.full((query.clouds,), sigma)), beta, tol)
    total = query.clouds * query.tiles
    sample = torch.linspace(0, total - 1, min(num_samples, total)).round().long()
    tiles, parts = walk.count_near(sample.numpy(), cutoff)
    pairs_of_part = (TILE // walk.PARTS) ** 2
    return tiles * total / len(sample), parts * pairs_of_part * total / len(sample)


def excess(value: Tensor, bias: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Compute log max(1, max_c |v_jc| / mean_c), (B, M): by how much values exceed the mean size of their channel.

    The means of the sizes of values (B, M, C) have the weights e^b. With a large value, a key of small weight matters
    as much as one of large weight.
    """
    sizes, top = value.abs().to(bias.dtype), ranks.highest(bias.T)[:, None]
    weights = torch.exp(bias - torch.where(top == -torch.inf, 0, top))  # (B, M)
    total = ranks.total(weights).clamp(min=1)[:, None]  # the largest weight is 1
    mean = ranks.sum(torch.einsum("bm,bmc->bc", weights, sizes)) / total
    largest = (sizes / torch.where(mean > 0, mean, torch.inf)[:, None]).amax(-1)
    return torch.log(largest.clamp(min=1))


def _scale(query: Tiling, sigma: Tensor | None) -> Tensor:
    """Return c (B,) with exp(−‖x − y‖² / 2σ²) = 2^(−c ‖x − y‖²)."""
    ones = torch.ones(query.clouds, dtype=query.points.dtype)
    return ones * FACTOR**2 if sigma is None else (FACTOR / sigma.detach().cpu().double()).square().to(ones)


def _per_cloud(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x (tiles, TILE) by one factor per cloud, (B,)."""
    return (x.unflatten(0, (len(factor), -1)) * factor[:, None, None]).flatten(0, 1)


def _tiles_of_clouds(query: Tiling, key: Tiling, bias: Tensor) -> Tensor:
    """Return the range of key tiles of each query tile, (tiles, 2); empty for clouds without keys."""
    first = key.tiles * torch.arange(query.clouds)
    last = torch.where(bias.isfinite().any(-1), first + key.tiles, first)
    return torch.stack([first, last], dim=1).repeat_interleave(query.tiles, 0)


def _unrolled(query: Tiling) -> tuple[int, ...]:
    """Return a tuple whose length is the dimension, for the compiler; empty if no loop is compiled for it."""
    return (0,) * query.dims if query.dims <= _UNROLLED else ()


def _chunks(key_tiles: Tensor, *, is_limited: bool) -> list[tuple[int, int]]:
    """Ranges of query tiles of about equal work."""
    tiles = len(key_tiles)
    if is_limited:
        return chunks(tiles, -(-tiles // (_CHUNKS * torch.get_num_threads())))
    total = max(1, TILE * TILE * int((key_tiles[:, 1] - key_tiles[:, 0]).sum()))
    pairs = min(_MAX_PAIRS, max(_MIN_PAIRS, total // (4 * torch.get_num_threads())))
    return chunks(tiles, max(1, pairs * tiles // total))


def _cutoff(
    query: Tiling, key: Tiling, scale: Tensor, beta: Tensor, tol: float, by_value: Tensor | None = None
) -> "GaussianCutoff":
    """Make the cut-off for weights 2^(β − c ‖x − y‖²), with c (B,) and β (tiles, TILE).

    If values make keys matter more than their weight, `by_value` is the larger β that accounts for them.
    """
    from qattn.tiles.loops.cutoff import GaussianCutoff

    # The sum of a row is at least the term of the point itself.
    floors = beta.amin(-1) if query is key else beta.new_full((query.clouds * query.tiles,), -torch.inf)
    part_tops, sums = key.log_sums(beta)
    tops = sums
    if by_value is not None:
        part_tops, tops = key.log_sums(by_value)
    arrays = {
        "floors": floors, "starts": key.tree.starts, "queries": query.tree.nodes.flatten(0, 1),
        "query_parts": query.tree.parts, "keys": key.tree.nodes.flatten(0, 1), "key_parts": key.tree.parts,
        "tops": tops.flatten(), "part_tops": part_tops, "sums": sums.flatten(), "scales": scale,
    }  # fmt: skip
    log_tol: Any = torch.tensor(math.log2(tol), dtype=beta.dtype).numpy()[()]  # a NumPy scalar of the loops' dtype
    return GaussianCutoff(
        tol=log_tol,
        query_tiles=query.tiles,
        query_nodes=query.tree.nodes.shape[1],
        key_nodes=key.tree.nodes.shape[1],
        **{name: x.numpy() for name, x in arrays.items()},
    )
