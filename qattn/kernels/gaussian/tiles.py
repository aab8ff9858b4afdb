"""The method "tiles": attention between pairs of tiles that are near enough to matter, and no others.

The points are sorted once, in the order of a k-d tree. Each pass finds the pairs of tiles that matter from their boxes
and the biases, in a small part of its time. Memory does not grow with the number of pairs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.dispatch import Dispatch, select
from qattn.attention.engine import Engine, Fused
from qattn.attention.inputs import BlockLists, Inputs
from qattn.tiles import gaussian
from qattn.tiles.sizes import TILE
from qattn.tiles.tiling import Tiling

__all__ = ["BACKENDS", "SortedCloud", "Tiles"]

BACKENDS = ("native", "flex")


class SortedCloud:
    """Points (B, N, D) and their order (B, N), on the CPU; tiled at first use."""

    def __init__(self, points: Tensor, order: Tensor) -> None:
        self.points, self.order = points.detach().cpu(), order
        self._tilings: dict[torch.dtype, Tiling] = {}

    def tiling(self, dtype: torch.dtype) -> Tiling:
        """Return the tiles, with coordinates of a dtype."""
        if dtype not in self._tilings:
            self._tilings[dtype] = Tiling(self.points.to(dtype), self.order)
        return self._tilings[dtype]


class Tiles(Engine, Fused):
    """Attention from one sorted cloud to another, or to itself.

    Args:
        query: Points that attend.
        key: Points attended to; the same object if a cloud attends to itself.
        backend: "native", or "flex" with lists of blocks; "auto" is native on a CPU and flex on CUDA.
        is_strict: Whether unsupported inputs raise an error. If False, all pairs are computed for them.
    """

    def __init__(self, query: SortedCloud, key: SortedCloud, backend: str = "auto", is_strict: bool = True) -> None:
        self._query, self._key, self._backend, self._is_strict = query, key, backend, is_strict

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
        if not self._is_strict and self.not_supported_reasons(inputs):
            return Dispatch().attend(inputs)
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        if self._backend_on(inputs.device) == "native":
            return gaussian.attend(query, key, inputs.sigma, inputs.value, inputs.bias, inputs.tol)
        bias = inputs.biases
        counts, lists = gaussian.near_tiles(query, key, inputs.sigma, bias.to(inputs.dtype), inputs.tol)
        blocks = BlockLists(counts.to(bias.device), lists.to(bias.device), TILE)
        ordered = replace(
            inputs,
            query=query.sort(inputs.query),
            key=key.sort(inputs.key),
            value=None if inputs.value is None else key.sort(inputs.value),
            bias=key.sort(bias),
            blocks=blocks,
        )
        out, lse = select(ordered, "flex").attend(ordered)
        return Attended(None if out is None else query.unsort(out), query.unsort(lse))

    @property
    def transposed(self) -> "Tiles":
        return Tiles(self._key, self._query, self._backend, self._is_strict)

    @property
    def for_gradients(self) -> "Tiles":
        return Tiles(self._query, self._key, self._backend, is_strict=False)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return self._backend_on(inputs.device) == "native"

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        return gaussian.differentiate(query, key, inputs.sigma, inputs.bias, terms, inputs.tol)
