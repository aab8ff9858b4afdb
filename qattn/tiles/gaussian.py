"""Gaussian attention between two clouds in tiles, and sums of its derivatives over pairs, on CPUs.

Compiled loops compute them, or `by_torch` as long as compiling does not pay.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives, PairSums, PairTerms
from qattn.tiles import by_torch
from qattn.tiles.pairs import both_sides, near_blocks, rounds
from qattn.tiles.sizes import TILE
from qattn.tiles.threads import chunks, even_chunks, share
from qattn.tiles.tiling import Tiling, Weights, excess, scales_of
from qattn.tiles.when_to_compile import Loop, charge, is_due, seconds_until_due

if TYPE_CHECKING:
    from qattn.tiles.loops.cutoff import GaussianCutoff

__all__ = ["attend", "differentiate", "loop_of", "near_tiles"]

_UNROLLED = 4  # largest dimension with a loop compiled for it
# Pairs of points per task of a thread: the least pays for the overhead, the most keeps threads equally busy.
_MIN_PAIRS, _MAX_PAIRS = 2**18, 2**22
_CHUNKS = 16  # tasks per thread
_PASSES_OF_SUMS = 4.0  # passes of `by_torch.attend` in the time of one `by_torch.differentiate`, about


def attend(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    tol: float | None = None,
    *,
    compile_now: bool = False,
) -> Attended:
    """Attend with the scores −‖q − k‖² / 2σ² + b.

    Args:
        query: Clouds that attend.
        key: Clouds attended to; the same object if clouds attend to themselves.
        sigma: Bandwidths (B,); 1 if None.
        value: Values (B, M, C) in the order of the clouds, or None for lse alone.
        bias: Biases (B, M), 0 if None.
        tol: Fraction of a row sum that may be left out, both of weights and of sizes of weighted values; None to
            compute all pairs.
        compile_now: Whether to compile the loops at once if they are not compiled, however short this pass is.
    """
    loop = loop_of("attend" if tol is None else "attend near", query.cloud.dtype, query.dims)
    if not compile_now and (seconds := _seconds_by_torch(loop, query, key, sigma, tol)) is not None:
        charge(loop, seconds)
        return by_torch.attend(query, key, sigma, value, bias, tol)
    from qattn.tiles.loops import gaussian, simd  # here, because importing Numba takes a while

    B, M, dtype = query.clouds, key.size, query.points.dtype
    bias = torch.zeros(B, M, dtype=dtype) if bias is None else bias.to(dtype)
    scale = scales_of(query, sigma)
    weights = key.weights(bias, scale=scale)

    C = 0 if value is None else value.shape[-1]
    lanes = simd.REGISTER_BYTES // dtype.itemsize
    are_few = 0 < C <= lanes // 2
    values = torch.empty(len(key.points), TILE, 0, dtype=dtype)
    if value is not None:
        v = value.to(dtype)
        values = key.columns_of(v) if are_few else key.rows(v, -(-C // lanes) * lanes)
    lse, out = torch.empty(B, query.size, dtype=dtype), torch.empty(B, query.size, C, dtype=dtype)

    key_tiles, cutoff = _tiles_of_clouds(query, key, weights), None
    rows: list[tuple[int, int]] = _chunks(key_tiles, is_limited=tol is not None)
    if tol is not None:
        by_value = None if value is None else key.weights(bias + excess(value, bias), weights.top)
        cutoff = _cutoff(query, key, scale, weights, tol, by_value)
    # Row sums above it are not affected by weights that count as 0.
    tiny = M * 2.0 ** simd.LOWEST[8 * dtype.itemsize] / torch.finfo(dtype).eps
    if cutoff is not None and value is None and query is key and _unrolled(query):
        lse, rows = _sums_of_pairs(query, scale, weights, cutoff, tiny)
    tensors = query.points, query.order, scale, key.columns, weights.beta, weights.top, values
    arrays = [*(x.numpy() for x in tensors), key_tiles]
    run = partial(gaussian.attend_tiles, *arrays, cutoff, tiny, _unrolled(query), are_few, lse.numpy(), out.numpy())
    share(run, rows)
    loop.remember()
    return Attended(None if value is None else out.to(value.dtype), lse)


def _sums_of_pairs(
    cloud: Tiling, scale: Tensor, weights: Weights, cutoff: "GaussianCutoff", tiny: float
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Compute lse (B, N) of clouds that attend to themselves, with one exponential for both rows of a pair of points.

    Returns:
        lse, and the ranges of tiles whose row sums are too small for it to be right.
    """
    from qattn.tiles.loops.gaussian import sum_tiles  # here, because importing Numba takes a while

    scales = scale.repeat_interleave(cloud.tiles)[:, None]
    powers = torch.exp2(weights.beta * scales)  # (B T, TILE)
    rowwise, columnwise = torch.zeros_like(powers), torch.zeros_like(powers)
    reach = both_sides(cloud, cloud, cutoff, cutoff)
    arrays = [x.numpy() for x in (cloud.points, scale, cloud.columns, powers)]
    run = partial(sum_tiles, *arrays, cutoff, reach, _unrolled(cloud), rowwise.numpy(), columnwise.numpy())
    share(run, *rounds(cloud, cloud, near_blocks(cloud, cloud, scale, cutoff, reach), is_half=True))
    sums = rowwise.add_(columnwise)
    is_low = ~(sums >= tiny)
    is_low.view(cloud.clouds, -1)[:, cloud.size :] = False  # the last tile is filled by points that do not count
    low = is_low.any(1).nonzero()[:, 0].tolist()
    lse = cloud.from_rows(sums.log_()[..., None])[..., 0].add_(weights.top)
    return lse, [(tile, tile + 1) for tile in low]


def differentiate(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    bias: Tensor | None,
    terms: PairTerms,
    tol: float | None = None,
    *,
    compile_now: bool = False,
) -> PairSums:
    """Compute sums over pairs of the terms s̄_ij = exp(s_ij − shift_i) R_i · S_j.

    The results are the same for any number of threads. Blocks of queries and blocks of keys meet in rounds. A block
    takes part in a round once, so that no two threads ever add to the same sum.

    Args:
        query: Clouds that attend.
        key: Clouds attended to.
        sigma: Bandwidths (B,); 1 if None.
        bias: Biases (B, M) of the scores s, 0 if None.
        terms: Rows R, columns S and shifts, and the sums that are needed.
        tol: Fraction of Σ_j p_ij |S_j|, and of Σ_i p_ij |R_i|, that may be left out; None to compute all pairs.
        compile_now: As in `attend`.
    """
    loop = loop_of("differentiate" if tol is None else "differentiate near", query.cloud.dtype, query.dims)
    if not compile_now and (seconds := _seconds_by_torch(loop, query, key, sigma, tol, _PASSES_OF_SUMS)) is not None:
        charge(loop, seconds)
        return by_torch.differentiate(query, key, sigma, bias, terms, tol)
    from qattn.tiles.loops import gaussian  # here, because importing Numba takes a while

    B, dtype, D = query.clouds, query.points.dtype, query.dims
    bias = torch.zeros(B, key.size, dtype=dtype) if bias is None else bias.to(dtype)
    row, column, shift = (x.to(dtype) for x in terms[:3])
    by_column, num_values, scale = terms.by_column, terms.num_values, scales_of(query, sigma)
    weights = key.weights(bias, scale=scale)
    shift = shift - weights.top
    rows, columns = query.rows(row), key.columns_of(column)
    shifts = query.padded((shift.double() / (scale.double()[:, None] * math.log(2))).to(dtype), torch.inf)
    rowwise = torch.zeros(len(rows), TILE, D + 2, dtype=dtype)
    columnwise = torch.zeros(len(columns) if by_column else 0, D + 1, TILE, dtype=dtype)
    values = torch.zeros(len(columns) if num_values else 0, num_values, TILE, dtype=dtype)

    cutoff = reach = None
    if tol is not None:
        cutoff = _cutoff(query, key, scale, key.weights(bias + torch.log(column.abs().amax(-1)), weights.top), tol)
        back = None
        if by_column or num_values:
            sizes = query.weights(torch.log(row.abs().amax(-1)) - shift, torch.zeros_like(weights.top))
            back = _cutoff(key, query, scale, sizes, tol)
        reach = both_sides(query, key, cutoff, back)
    arrays = [x.numpy() for x in (query.points, scale, shifts, rows, key.columns, weights.beta, columns)]
    results = [x.numpy() for x in (rowwise, columnwise, values)]
    run = partial(gaussian.differentiate_tiles, *arrays, cutoff, reach, terms.by_points, *results)
    near = None if cutoff is None or reach is None else near_blocks(query, key, scale, cutoff, reach)
    share(run, *rounds(query, key, near))
    loop.remember()
    total, first, second = query.from_rows(rowwise).split([1, D, 1], dim=-1)
    result = PairSums(Derivatives(total[..., 0], first, second[..., 0]))
    if by_column:
        total, first = key.from_rows(columnwise.mT).split([1, D], dim=-1)
        result = result._replace(column_total=total[..., 0], column_first=first)
    return result._replace(values=key.from_rows(values.mT)) if num_values else result


def _seconds_by_torch(
    loop: Loop, query: Tiling, key: Tiling, sigma: Tensor | None, tol: float | None, passes: float = 1.0
) -> float | None:
    """Estimate how long torch takes for passes in place of a loop; None if the loop is due."""
    if seconds_until_due(loop) == 0:
        return None
    seconds = passes * by_torch.seconds_for(query, key, sigma, tol)
    return None if is_due(loop, seconds) else seconds


def near_tiles(query: Tiling, key: Tiling, sigma: Tensor | None, bias: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """List the key tiles that matter to each query tile, numbered within their cloud.

    Returns:
        Counts (B, T) and lists (B, T, width), int32; the width is a power of two, or the number of key tiles.
    """
    from qattn.tiles.loops.cutoff import list_near_tiles  # here, because importing Numba takes a while

    cutoff = _cutoff(query, key, scales_of(query, sigma), key.weights(bias.detach().cpu()), tol)
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


def loop_of(name: str, dtype: torch.dtype, dims: int) -> Loop:
    """Return the loops that are compiled to attend or to differentiate, in so many dimensions."""
    return Loop(name, dtype, min(dims, _UNROLLED + 1))


def _tiles_of_clouds(query: Tiling, key: Tiling, weights: Weights) -> np.ndarray:
    """Return the range of key tiles of each query tile, (tiles, 2); empty for clouds without keys."""
    first = key.tiles * np.arange(query.clouds)
    last = np.where((weights.tiles.numpy() > -np.inf).any(-1), first + key.tiles, first)
    return np.stack([first, last], axis=1).repeat(query.tiles, axis=0)


def _unrolled(query: Tiling) -> tuple[int, ...]:
    """Return a tuple whose length is the dimension, for the compiler; empty if no loop is compiled for it."""
    return (0,) * query.dims if query.dims <= _UNROLLED else ()


def _chunks(key_tiles: np.ndarray, *, is_limited: bool) -> list[tuple[int, int]]:
    """Split the query tiles into ranges of about equal work."""
    tiles = len(key_tiles)
    if is_limited:
        return even_chunks(tiles)
    total = max(1, TILE * TILE * int((key_tiles[:, 1] - key_tiles[:, 0]).sum()))
    pairs = min(_MAX_PAIRS, max(_MIN_PAIRS, total // (_CHUNKS * torch.get_num_threads())))
    return chunks(tiles, max(1, pairs * tiles // total))


def _cutoff(
    query: Tiling, key: Tiling, scale: Tensor, weights: Weights, tol: float, by_value: Weights | None = None
) -> "GaussianCutoff":
    """Make the cut-off for weights 2^(β − c ‖x − y‖²), with c (B,).

    If values make keys matter more than their weight, `by_value` has the larger weights that account for them.
    """
    from qattn.tiles.loops.cutoff import GaussianCutoff

    # The sum of a row is at least the term of the point itself.
    floors = weights.least if query is key else scale.new_full((query.clouds * query.tiles,), -torch.inf)
    tops, sums = weights if by_value is None else by_value, weights.nodes()
    arrays = {
        "floors": floors, "starts": key.tree.starts, "queries": query.tree.nodes.flatten(0, 1),
        "query_parts": query.tree.parts, "keys": key.tree.nodes.flatten(0, 1), "key_parts": key.tree.parts,
        "tops": sums if by_value is None else by_value.nodes(), "part_tops": tops.parts, "sums": sums, "scales": scale,
    }  # fmt: skip
    log_tol: Any = torch.tensor(math.log2(tol), dtype=scale.dtype).numpy()[()]  # a NumPy scalar of the loops' dtype
    return GaussianCutoff(
        tol=log_tol,
        query_tiles=query.tiles,
        query_nodes=query.tree.nodes.shape[1],
        key_nodes=key.tree.nodes.shape[1],
        **{name: x.numpy() for name, x in arrays.items()},
    )
