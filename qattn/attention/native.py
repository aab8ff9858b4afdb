"""The `native` backend: our own loop for CPUs, compiled by Numba, with differences taken directly.

No lift, so no cancellation; the work is shared by as many threads as torch uses. The loop is compiled on its first use
for a dtype and dimension, and kept on disk.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn._compiled import share, why_not_compiled
from qattn.attended import Attended
from qattn.attention.backend import Backend, Derivatives, Differentiating
from qattn.attention.inputs import Inputs
from qattn.ranks import ALONE, Ranks
from qattn.tiling import FACTOR, TILE, Tiling

__all__ = ["LOWEST", "Native", "attend_tilings", "cutoff", "differentiate_tilings", "excess", "in_base_2", "scale_of"]

_UNROLLED = 4  # dimensions up to this have a loop of their own
# Pairs of points handed to a thread at a time: the least pays for starting it, the most keeps threads equally busy.
_LEAST_PAIRS, _MOST_PAIRS = 2**21, 2**22
_CHUNKS = 16  # for each thread, where the number of pairs is not known
LOWEST = {32: -100.0, 64: -960.0}  # weights below 2 to this, by the bits of their dtype, count as 0


class Native(Backend, Differentiating):
    """Tiles of queries against tiles of keys."""

    name: ClassVar[str] = "native"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if inputs.device.type != "cpu":
            reasons.append(f"device is {inputs.device.type} (takes cpu)")
        if not inputs.is_gaussian:
            reasons.append("the score is not the Gaussian one, which is compiled in")
        if reason := why_not_compiled():
            reasons.append(reason)
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        return attend_tilings(*self._tilings(inputs), inputs.sigma, inputs.value, inputs.bias)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        return differentiate_tilings(*self._tilings(inputs), inputs.sigma, row, column, inputs.bias, shift)

    def _tilings(self, inputs: Inputs) -> tuple[Tiling, Tiling]:
        key = Tiling(inputs.key.to(inputs.dtype))
        return key if inputs.query is inputs.key else Tiling(inputs.query.to(inputs.dtype)), key


def attend_tilings(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    tol: float | None = None,
) -> Attended:
    """Attention between two clouds in tiles, for value (B, M, C) and bias (B, M) in the order of the clouds.

    The bandwidths sigma (B,) are 1 by default. With a `tol`, tiles are left out that together have less than about
    this fraction of a row's sum, and of a sum of the sizes of its values.
    """
    from qattn.attention import _loops  # here, because importing Numba takes a while

    B, M = query.clouds, key.size
    dtype = query.points.dtype
    bias = torch.zeros(B, M, dtype=dtype) if bias is None else bias.to(dtype)
    beta, top = in_base_2(key, bias)
    scale = scale_of(query, sigma)

    C = 0 if value is None else value.shape[-1]
    channels = _in_registers(C, dtype)
    values = torch.zeros(B, key.tiles * TILE, channels, dtype=dtype)
    if value is not None:
        values[:, :M, :C] = key.sort(value.to(dtype))
    values = values.reshape(B * key.tiles, TILE, channels)
    lse = torch.empty(B * query.tiles, TILE, dtype=dtype)
    out = torch.empty(B * query.tiles, TILE, channels, dtype=dtype)

    limit = None
    if tol is not None:
        by_value = None if value is None else in_base_2(key, bias + excess(value, bias), top)[0]
        limit = cutoff(query, key, scale, beta, tol, by_value)
    # The least sum of a row that is not changed by weights counted as 0.
    tiny = M * 2.0 ** LOWEST[8 * dtype.itemsize] / torch.finfo(dtype).eps
    key_tiles = _tiles_of_clouds(query, key, bias)
    arrays = [x.numpy() for x in (query.points, scale, key.columns, _per_cloud(beta, 1 / scale), values, key_tiles)]
    results, dims = (lse.numpy(), out.numpy()), _unrolled(query)

    def run(begin: int, end: int) -> None:
        _loops.attend_tiles(*arrays, limit, begin, end, tiny, dims, *results)

    _share_tiles(run, key_tiles, is_limited=tol is not None)
    lse = query.untiled(lse) * math.log(2) + top
    if value is None:
        return Attended(None, lse)
    return Attended(query.untiled(out[..., :C]).to(value.dtype), lse)


def differentiate_tilings(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    shift: Tensor,
    tol: float | None = None,
) -> Derivatives:
    """See `Differentiating.differentiate`: the same sums over pairs of tiles.

    With a `tol`, tiles are left out that together have less than about this fraction of Σ_j p_ij |S_j|.
    """
    from qattn.attention import _loops  # here, because importing Numba takes a while

    B, dtype = query.clouds, query.points.dtype
    bias = torch.zeros(B, key.size, dtype=dtype) if bias is None else bias.to(dtype)
    beta, top = in_base_2(key, bias)
    scale = scale_of(query, sigma)
    rows, columns = query.tiled(row.to(dtype)).contiguous(), key.tiled(column.to(dtype))
    shifts = _per_cloud(query.tiled((shift.to(dtype) - top) / math.log(2)), 1 / scale)
    result = torch.empty(len(rows), TILE, query.dims + 2, dtype=dtype)

    limit = None
    if tol is not None:
        limit = cutoff(query, key, scale, beta + torch.log2(columns.abs().amax(-1)), tol)
    key_tiles = _tiles_of_clouds(query, key, bias)
    beta = _per_cloud(beta, 1 / scale)
    tensors = query.points, scale, shifts, rows, key.columns, beta, columns.mT.contiguous(), key_tiles
    arrays, dims = [x.numpy() for x in tensors], _unrolled(query)

    def run(begin: int, end: int) -> None:
        _loops.differentiate_tiles(*arrays, limit, begin, end, dims, result.numpy())

    _share_tiles(run, key_tiles, is_limited=tol is not None)
    total, first, second = query.untiled(result).split([1, query.dims, 1], dim=-1)
    return Derivatives(total[..., 0], first, second[..., 0])


def scale_of(query: Tiling, sigma: Tensor | None) -> Tensor:
    """c (B,) of exp(−‖x − y‖² / 2σ²) = 2^(−c ‖x − y‖²)."""
    ones = torch.ones(query.clouds, dtype=query.points.dtype)
    return ones * FACTOR**2 if sigma is None else (FACTOR / sigma.detach().cpu().double()).square().to(ones)


def _per_cloud(x: Tensor, factor: Tensor) -> Tensor:
    """x (tiles, TILE) times a factor (B,) of each cloud."""
    return (x.unflatten(0, (len(factor), -1)) * factor[:, None, None]).flatten(0, 1)


def _in_registers(channels: int, dtype: torch.dtype) -> int:
    """The next multiple of the numbers that a register holds."""
    from qattn.attention import _simd

    lanes = _simd.REGISTER_BYTES // dtype.itemsize
    return -(-channels // lanes) * lanes


def excess(value: Tensor, bias: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """log of how many times larger than the mean size of its channel, if at all, the values of each key are: (B, M).

    For values (B, M, C) and a bias (B, M), whose weights the means have. A light point with a large value matters as a
    heavy one does.
    """
    sizes, top = value.abs().to(bias.dtype), ranks.highest(bias.T)[:, None]
    weights = torch.exp(bias - torch.where(top == -torch.inf, 0, top))  # (B, M)
    total = ranks.total(weights).clamp(min=1)[:, None]  # 1 is that of the largest
    mean = ranks.sum(torch.einsum("bm,bmc->bc", weights, sizes)) / total
    largest = (sizes / torch.where(mean > 0, mean, torch.inf)[:, None]).amax(-1)
    return torch.log(largest.clamp(min=1))


def _tiles_of_clouds(query: Tiling, key: Tiling, bias: Tensor) -> Tensor:
    """Where the tiles of keys of each tile of queries begin and end, (tiles, 2); none for clouds without any key."""
    first = key.tiles * torch.arange(query.clouds)
    last = torch.where(bias.isfinite().any(-1), first + key.tiles, first)
    return torch.stack([first, last], dim=1).repeat_interleave(query.tiles, 0)


def _unrolled(query: Tiling) -> tuple[int, ...]:
    """As many items as there are dimensions, if a loop is compiled for that many."""
    return (0,) * query.dims if query.dims <= _UNROLLED else ()


def _share_tiles(run: Callable[[int, int], None], key_tiles: Tensor, *, is_limited: bool) -> None:
    """Runs a loop over all tiles of queries, in chunks of about equal work."""
    tiles = len(key_tiles)
    if is_limited:
        chunk = -(-tiles // (_CHUNKS * torch.get_num_threads()))
    else:
        total = max(1, TILE * TILE * int((key_tiles[:, 1] - key_tiles[:, 0]).sum()))
        pairs = min(_MOST_PAIRS, max(_LEAST_PAIRS, total // (4 * torch.get_num_threads())))
        chunk = max(1, pairs * tiles // total)
    chunks = range(0, tiles, chunk)
    share(lambda begin: run(begin, min(begin + chunk, tiles)), chunks, len(chunks))


def in_base_2(key: Tiling, bias: Tensor, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """β (tiles, TILE) with exp(b) = 2^β e^top, and top (B, 1), by default that which makes the largest β 0."""
    if top is None:
        top = bias.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
    beta = key.sort((bias - top) / math.log(2))
    return pad(beta, (0, key.tiles * TILE - key.size), value=-torch.inf).reshape(-1, TILE), top


def cutoff(query: Tiling, key: Tiling, scale: Tensor, beta: Tensor, tol: float, by_value: Tensor | None = None) -> Any:
    """What the walk down the tree of keys needs to know, for weights 2^(β − c ‖x − y‖²), c (B,) and β (tiles, TILE).

    Where values make keys count for more than their weight, `by_value` is the larger β that they count for.
    """
    from qattn.attention._near import Cutoff

    # A row has at least what it adds to itself.
    floors = beta.amin(-1) if query is key else beta.new_full((query.clouds * query.tiles,), -torch.inf)
    part_tops, sums = key.tops(beta)
    tops = sums
    if by_value is not None:
        part_tops, tops = key.tops(by_value)
    arrays = {
        "scales": scale, "floors": floors, "queries": query.tree.nodes, "query_parts": query.tree.parts,
        "key_parts": key.tree.parts, "part_tops": part_tops, "nodes": key.tree.nodes, "tops": tops,
        "sums": sums, "starts": key.tree.starts,
    }  # fmt: skip
    limit: Any = torch.tensor(math.log2(tol), dtype=beta.dtype).numpy()[()]  # a number of the loops' own type
    return Cutoff(tol=limit, query_tiles=query.tiles, **{name: x.numpy() for name, x in arrays.items()})
