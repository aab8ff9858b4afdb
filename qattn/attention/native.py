"""The `native` backend: our own loop for CPUs, compiled by Numba, with differences taken directly.

No lift, so no cancellation; the work is shared by as many threads as torch uses. The loop is compiled on its first use
for a dtype and dimension, and kept on disk.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn._compiled import share, why_not_compiled
from qattn.attended import Attended
from qattn.attention.backend import Backend, Moments
from qattn.attention.inputs import Inputs
from qattn.lift import centre
from qattn.tiling import FACTOR, TILE, Tiling

__all__ = ["LOWEST", "Native", "attend_tilings", "attend_tilings_with_moments", "cutoff", "in_base_2"]

_UNROLLED = 4  # dimensions up to this have a loop of their own
# Pairs of points handed to a thread at a time: the least pays for starting it, the most keeps threads equally busy.
_LEAST_PAIRS, _MOST_PAIRS = 2**21, 2**22
_CHUNKS = 16  # for each thread, where the number of pairs is not known
LOWEST = {32: -100.0, 64: -960.0}  # weights below 2 to this, by the bits of their dtype, count as 0


class Native(Backend, Moments):
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
        return attend_tilings(*self._tilings(inputs), inputs.value, inputs.bias)

    def takes_moments(self, inputs: Inputs) -> bool:
        return True

    def attend_with_moments(self, inputs: Inputs) -> tuple[Attended, Tensor]:
        assert inputs.value is not None
        return attend_tilings_with_moments(*self._tilings(inputs), inputs.value, inputs.bias)

    def _tilings(self, inputs: Inputs) -> tuple[Tiling, Tiling]:
        query, key = centre(inputs.query.to(inputs.dtype), inputs.key.to(inputs.dtype))  # small coordinates round less
        return Tiling(query), Tiling(key)


def attend_tilings(
    query: Tiling, key: Tiling, value: Tensor | None, bias: Tensor | None, tol: float | None = None
) -> Attended:
    """Attention between two clouds in tiles, for value (B, M, C) and bias (B, M) in the order of the clouds.

    With a `tol`, tiles are left out that together have less than about this fraction of a row's sum.
    """
    return _attended(query, key, value, bias, tol, None)


def attend_tilings_with_moments(
    query: Tiling, key: Tiling, value: Tensor, bias: Tensor | None, tol: float | None = None
) -> tuple[Attended, Tensor]:
    """The same, and averages of values times ‖q − k‖², (B, N, C)."""
    C, dtype = value.shape[-1], query.points.dtype
    moments = torch.empty(query.clouds * query.tiles, TILE, _in_registers(C, dtype), dtype=dtype)
    attended = _attended(query, key, value, bias, tol, moments)
    return attended, query.untiled(moments[..., :C]) / FACTOR**2


def _in_registers(channels: int, dtype: torch.dtype) -> int:
    """The next multiple of the numbers that a register holds."""
    from qattn.attention import _simd

    lanes = _simd.REGISTER_BYTES // dtype.itemsize
    return -(-channels // lanes) * lanes


def _attended(
    query: Tiling, key: Tiling, value: Tensor | None, bias: Tensor | None, tol: float | None, moments: Tensor | None
) -> Attended:
    """Attention between tilings; moments (tiles, TILE, C), C in whole registers, are written if there is room."""
    from qattn.attention import _loops  # here, because importing Numba takes a while

    B, M = query.clouds, key.size
    dtype = query.points.dtype
    bias = torch.zeros(B, M, dtype=dtype) if bias is None else bias.to(dtype)
    beta, top = in_base_2(key, bias)

    C = 0 if value is None else value.shape[-1]
    channels = _in_registers(C, dtype)
    values = torch.zeros(B, key.tiles * TILE, channels, dtype=dtype)
    if value is not None:
        values[:, :M, :C] = key.sort(value.to(dtype))
    values = values.reshape(B * key.tiles, TILE, channels)
    tiles = B * query.tiles
    lse, out = torch.empty(tiles, TILE, dtype=dtype), torch.empty(tiles, TILE, channels, dtype=dtype)

    first = key.tiles * torch.arange(B)
    last = torch.where(bias.isfinite().any(-1), first + key.tiles, first)  # clouds without any key cost nothing
    key_tiles = torch.stack([first, last], dim=1).repeat_interleave(query.tiles, 0)
    limit = None if tol is None else cutoff(query, key, beta, tol)
    # The least sum of a row that is not changed by weights counted as 0.
    tiny = M * 2.0 ** LOWEST[8 * dtype.itemsize] / torch.finfo(dtype).eps
    dims = (0,) * query.dims if query.dims <= _UNROLLED else ()
    arrays = [x.numpy() for x in (query.points, key.columns, beta, values, key_tiles)]
    results = lse.numpy(), out.numpy(), None if moments is None else moments.numpy()
    if tol is None:
        total = max(1, TILE * TILE * int((key_tiles[:, 1] - key_tiles[:, 0]).sum()))
        pairs = min(_MOST_PAIRS, max(_LEAST_PAIRS, total // (4 * torch.get_num_threads())))
        chunk = max(1, pairs * tiles // total)
    else:
        chunk = -(-tiles // (_CHUNKS * torch.get_num_threads()))

    def run(begin: int) -> None:
        _loops.attend_tiles(*arrays, limit, begin, min(begin + chunk, tiles), tiny, dims, *results)

    chunks = range(0, tiles, chunk)
    share(run, chunks, len(chunks))
    lse = query.untiled(lse) * math.log(2) + top
    if value is None:
        return Attended(None, lse)
    return Attended(query.untiled(out[..., :C]).to(value.dtype), lse)


def in_base_2(key: Tiling, bias: Tensor) -> tuple[Tensor, Tensor]:
    """β (tiles, TILE) with exp(b − ½‖q − k‖²) = 2^(β − ‖q − k‖²) e^top, and top (B, 1), which makes the largest 0."""
    top = bias.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    beta = key.sort((bias - top) / math.log(2))
    return pad(beta, (0, key.tiles * TILE - key.size), value=-torch.inf).reshape(-1, TILE), top


def cutoff(query: Tiling, key: Tiling, beta: Tensor, tol: float) -> Any:
    """What the walk down the tree of keys needs to know, for β (tiles, TILE)."""
    from qattn.attention._near import Cutoff

    # A row has at least what it adds to itself.
    floors = beta.amin(-1) if query is key else beta.new_full((query.clouds * query.tiles,), -torch.inf)
    part_tops, tops = key.tops(beta)
    arrays = {
        "floors": floors, "queries": query.tree.nodes, "query_parts": query.tree.parts, "key_parts": key.tree.parts,
        "part_tops": part_tops, "nodes": key.tree.nodes, "tops": tops, "starts": key.tree.starts,
    }  # fmt: skip
    limit: Any = torch.tensor(math.log2(tol), dtype=beta.dtype).numpy()[()]  # a number of the loops' own type
    return Cutoff(tol=limit, query_tiles=query.tiles, **{name: x.numpy() for name, x in arrays.items()})
