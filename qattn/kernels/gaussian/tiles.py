"""The method "tiles": attention between pairs of tiles that are near enough to matter, and no others.

The points are sorted once, in the order of a k-d tree. Each pass finds the pairs of tiles that matter from their boxes
and the biases, in a small part of its time. Memory does not grow with the number of pairs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.dispatch import Dispatch, reasons_against
from qattn.attention.engine import Engine, Fused
from qattn.attention.inputs import BlockLists, Inputs
from qattn.attention.tensor_cores import is_lift_exact
from qattn.lift import Extent
from qattn.tiles import device, gaussian
from qattn.tiles.device import Cutoff, DeviceTiling
from qattn.tiles.sizes import TILE
from qattn.tiles.tiling import Tiling

__all__ = ["BACKENDS", "SortedCloud", "Tiles"]

BACKENDS = ("native", "triton", "flex")


class SortedCloud:
    """Points (B, N, D) and their order (B, N), on the CPU; tiled at first use."""

    def __init__(self, points: Tensor, order: Tensor) -> None:
        self.points, self.order = points.detach().cpu(), order
        self._tilings: dict[torch.dtype, Tiling] = {}
        self._on_devices: dict[torch.device, DeviceTiling] = {}

    def tiling(self, dtype: torch.dtype) -> Tiling:
        """Return the tiles, with coordinates of a dtype."""
        if dtype not in self._tilings:
            self._tilings[dtype] = Tiling(self.points.to(dtype), self.order)
        return self._tilings[dtype]

    def on(self, device: torch.device) -> DeviceTiling:
        """Return the tiles on a GPU, with float32 coordinates."""
        if device not in self._on_devices:
            self._on_devices[device] = DeviceTiling(self.points.to(device), self.order.to(device))
        return self._on_devices[device]


class Tiles(Engine, Fused):
    """Attention from one sorted cloud to another, or to itself.

    Args:
        query: Points that attend.
        key: Points attended to; the same object if a cloud attends to itself.
        backend: "native", "triton", or "flex" with lists of blocks from the host; "auto" is native on a CPU, and on
            CUDA triton if it takes the inputs, else flex.
        is_strict: Whether unsupported inputs raise an error. If False, all pairs are computed for them.
        widths: Memory for lists of tiles on a GPU (`Cutoff`), shared with the engines of gradients.
    """

    def __init__(
        self,
        query: SortedCloud,
        key: SortedCloud,
        backend: str = "auto",
        is_strict: bool = True,
        widths: dict[DeviceTiling, int] | None = None,
    ) -> None:
        self._query, self._key, self._backend, self._is_strict = query, key, backend, is_strict
        self._widths = {} if widths is None else widths
        self._extent: Extent | None = None

    def _backend_for(self, inputs: Inputs) -> str:
        if self._backend != "auto":
            return self._backend
        if inputs.device.type == "cpu":
            return "native"
        return "flex" if reasons_against("triton", inputs, warns=True) else "triton"

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        backend = self._backend_for(inputs)
        if inputs.device.type not in ("cpu", "cuda"):
            reasons.append(f"device is {inputs.device.type} (takes cpu, cuda)")
        if backend == "native" and inputs.device.type == "cuda":
            reasons.append("the native loops are for CPUs")
        if backend == "triton":
            reasons += reasons_against("triton", inputs)
        if backend == "flex" and inputs.dtype == torch.float64:
            reasons.append("FlexAttention does not take float64")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        if not self._is_strict and self.not_supported_reasons(inputs):
            return Dispatch().attend(inputs)
        backend = self._backend_for(inputs)
        if backend == "triton":
            return self._attend_on_device(inputs)
        if backend == "flex":
            return self._attend_by_lists(inputs)
        arguments = *self._tilings(inputs), inputs.sigma, inputs.value, inputs.bias, inputs.tol
        return gaussian.attend(*arguments, compile_now=self._backend == "native")

    def _tilings(self, inputs: Inputs) -> tuple[Tiling, Tiling]:
        return self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)

    def _on_device(self, inputs: Inputs) -> tuple[DeviceTiling, DeviceTiling, Cutoff]:
        return self._query.on(inputs.device), self._key.on(inputs.device), Cutoff(inputs.tol, self._widths)

    def _attend_on_device(self, inputs: Inputs) -> Attended:
        """Attend with the kernels of `triton`, which find the near tiles themselves."""
        on_query, on_key, cutoff = self._on_device(inputs)
        is_lifted = self._is_lifted(inputs, on_query, on_key)
        if is_lifted:
            cutoff = cutoff._replace(tol=0.5 * cutoff.tol)
        return device.attend(on_query, on_key, inputs.sigma, inputs.value, inputs.bias, cutoff, is_lifted)

    def _attend_by_lists(self, inputs: Inputs) -> Attended:
        """Attend with `flex`, by lists of near tiles from the host."""
        query, key = self._tilings(inputs)
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
        out, lse = Dispatch("flex").attend(ordered)
        return Attended(None if out is None else query.unsort(out), query.unsort(lse))

    def _is_lifted(self, inputs: Inputs, query: DeviceTiling, key: DeviceTiling) -> bool:
        """Return whether tensor cores serve: a lift pays off for the near pairs, and half of the tolerance suffices.

        How many are near is known after the first pass, which waits. It measures the points too, if they may be many.
        """
        inputs = replace(inputs, tol=0.5 * inputs.tol, known_extent=self._extent, bias_growth=2.0)
        near_tiles = min(key.tiles, self._widths.get(query, key.tiles))
        is_lifted = is_lift_exact(inputs, query.clouds * query.padded * near_tiles * TILE)
        self._extent = inputs.measured_extent
        return is_lifted and query in self._widths

    @property
    def transposed(self) -> "Tiles":
        return Tiles(self._key, self._query, self._backend, self._is_strict, self._widths)

    @property
    def for_gradients(self) -> "Tiles":
        return Tiles(self._query, self._key, self._backend, False, self._widths)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return self._backend_for(inputs) in ("native", "triton") and not self.not_supported_reasons(inputs)

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        if self._backend_for(inputs) == "triton":
            on_query, on_key, cutoff = self._on_device(inputs)
            return device.differentiate(on_query, on_key, inputs.sigma, inputs.bias, terms, cutoff)
        arguments = *self._tilings(inputs), inputs.sigma, inputs.bias, terms, inputs.tol
        return gaussian.differentiate(*arguments, compile_now=self._backend == "native")
