"""The method "tiles": attention between pairs of tiles that are near enough to matter, and no others.

The points are sorted once, in the order of a k-d tree. Which tiles matter to which is found anew in each pass, from
their boxes and the biases, by a walk that takes a small part of the pass; nothing of the size of the pairs is stored.
"""

from dataclasses import replace

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Derivatives, Differentiating, Engine
from qattn.attention.flex import BlockLists, attend_blocks
from qattn.attention.inputs import Inputs
from qattn.attention.native import attend_tilings, cutoff, differentiate_tilings, in_base_2, scale_of
from qattn.tiling import TILE, Tiling

__all__ = ["BACKENDS", "SortedCloud", "Tiles", "near_lists"]

BACKENDS = ("native", "flex")


class SortedCloud:
    """Points (B, N, D) and their order (B, N), kept on the CPU; in tiles when needed."""

    def __init__(self, points: Tensor, order: Tensor) -> None:
        self.points, self.order = points.detach().cpu(), order
        self._tilings: dict[torch.dtype, Tiling] = {}

    def tiling(self, dtype: torch.dtype) -> Tiling:
        """Its tiles, with coordinates of a dtype."""
        if dtype not in self._tilings:
            self._tilings[dtype] = Tiling(self.points.to(dtype), self.order)
        return self._tilings[dtype]


class Tiles(Engine, Differentiating):
    """Attention from one sorted cloud to another, or to itself.

    Args:
        query: The points that attend.
        key: The points attended to; the same object for a cloud and itself.
        backend: "native", or "flex" with lists of blocks; "auto" is native on a CPU and flex on CUDA.
    """

    def __init__(self, query: SortedCloud, key: SortedCloud, backend: str = "auto") -> None:
        self._query, self._key, self._backend = query, key, backend

    def _backend_on(self, device: torch.device) -> str:
        return self._backend if self._backend != "auto" else "native" if device.type == "cpu" else "flex"

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        backend = self._backend_on(inputs.device)
        if inputs.device.type not in ("cpu", "cuda"):
            reasons.append(f"device is {inputs.device.type} (takes cpu, cuda)")
        if backend == "native" and inputs.device.type == "cuda":
            reasons.append("the native loops are for CPUs")
        if backend == "flex" and inputs.dtype == torch.float64:
            reasons.append("FlexAttention does not take float64")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        if self._backend_on(inputs.device) == "native":
            return attend_tilings(query, key, inputs.sigma, inputs.value, inputs.bias, inputs.tol)
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        lists = near_lists(query, key, inputs.sigma, bias.to(inputs.dtype), inputs.tol)
        value = None if inputs.value is None else key.sort(inputs.value)
        ordered = replace(
            inputs, query=query.sort(inputs.query), key=key.sort(inputs.key), value=value, bias=key.sort(bias)
        )
        out, lse = attend_blocks(ordered, lists)
        return Attended(None if out is None else query.unsort(out), query.unsort(lse))

    def can_differentiate(self, inputs: Inputs) -> bool:
        return self._backend_on(inputs.device) == "native"

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        return differentiate_tilings(query, key, inputs.sigma, row, column, inputs.bias, shift, inputs.tol)

    @property
    def exchanged(self) -> "Tiles":
        return Tiles(self._key, self._query, self._backend)


def near_lists(query: Tiling, key: Tiling, sigma: Tensor | None, bias: Tensor, tol: float) -> BlockLists:
    """The tiles of keys that matter to each tile of queries, numbered within their cloud, for a bias (B, M)."""
    from qattn.attention._near import list_near_tiles  # here, because importing Numba takes a while

    limit = cutoff(query, key, scale_of(query, sigma), in_base_2(key, bias.detach().cpu())[0], tol)
    counts = torch.empty(query.clouds * query.tiles, dtype=torch.int64)
    list_near_tiles(limit, counts.numpy(), torch.empty(len(counts), 0, dtype=torch.int64).numpy())
    longest = max(1, int(counts.amax()))
    width = min(key.tiles, 1 << (longest - 1).bit_length())  # few widths: each one compiles a kernel
    lists = torch.zeros(len(counts), width, dtype=torch.int64)
    list_near_tiles(limit, counts.numpy(), lists.numpy())
    first = key.tiles * torch.arange(query.clouds).repeat_interleave(query.tiles)
    lists = torch.where(torch.arange(width) < counts[:, None], lists - first[:, None], 0)
    shape = query.clouds, query.tiles
    counts, lists = counts.reshape(shape).int(), lists.reshape(*shape, width).int()
    return BlockLists(counts.to(bias.device), lists.to(bias.device), TILE)
