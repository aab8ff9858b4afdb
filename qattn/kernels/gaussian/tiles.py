"""The method "tiles": attention between pairs of tiles that are near enough to matter, and no others.

The points are sorted once, in the order of a k-d tree. Each pass finds the pairs of tiles that matter from their boxes
and the biases, in a small part of its time. Memory does not grow with the number of pairs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention import dispatch
from qattn.attention.dispatch import Dispatch, select
from qattn.attention.engine import Engine, Fused
from qattn.attention.inputs import BlockLists, Inputs
from qattn.attention.tensor_cores import is_lift_exact
from qattn.lift import Extent
from qattn.tiles import device, gaussian, plain
from qattn.tiles.device import Cutoff, DeviceTiling
from qattn.tiles.meanwhile import Loop, is_due, patience
from qattn.tiles.sizes import TILE
from qattn.tiles.tiling import Tiling

__all__ = ["BACKENDS", "SortedCloud", "Tiles"]

BACKENDS = ("native", "triton", "flex")
_SAMPLE = 32  # tiles for which near tiles are counted, to estimate a duration
_PASSES_OF_GRADIENTS = 4.0  # of which gradients are made, if sums over pairs are not


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
        return "flex" if dispatch.reasons_against("triton", inputs) else "triton"

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        backend = self._backend_for(inputs)
        if inputs.device.type not in ("cpu", "cuda"):
            reasons.append(f"device is {inputs.device.type} (takes cpu, cuda)")
        if backend == "native" and inputs.device.type == "cuda":
            reasons.append("the native loops are for CPUs")
        if backend == "triton":
            reasons += dispatch.BACKENDS["triton"].not_supported_reasons(inputs)
        if backend == "flex" and inputs.dtype == torch.float64:
            reasons.append("FlexAttention does not take float64")
        return reasons

    def _on_device(self, inputs: Inputs) -> tuple[DeviceTiling, DeviceTiling, Cutoff]:
        return self._query.on(inputs.device), self._key.on(inputs.device), Cutoff(inputs.tol, self._widths)

    def attend(self, inputs: Inputs) -> Attended:
        if not self._is_strict and self.not_supported_reasons(inputs):
            return Dispatch().attend(inputs)
        backend = self._backend_for(inputs)
        if backend == "triton":
            on_query, on_key, cutoff = self._on_device(inputs)
            is_lifted = self._is_lifted(inputs, on_query, on_key)
            if is_lifted:
                cutoff = cutoff._replace(tol=0.5 * cutoff.tol)
            return device.attend(on_query, on_key, inputs.sigma, inputs.value, inputs.bias, cutoff, is_lifted)
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        if backend == "native":
            if not self._is_due(inputs, "attend near", 1.0):
                return plain.attend(query, key, inputs.sigma, inputs.value, inputs.bias, inputs.tol)
            attended = gaussian.attend(query, key, inputs.sigma, inputs.value, inputs.bias, inputs.tol)
            _loop(inputs, "attend near").remember()
            return attended
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

    def _is_lifted(self, inputs: Inputs, query: DeviceTiling, key: DeviceTiling) -> bool:
        """Return whether tensor cores serve: a lift pays off for the near pairs, and half of the tolerance suffices.

        How many are near is known after the first pass, which waits. It measures the points too, if they may be many.
        """
        inputs = replace(inputs, tol=0.5 * inputs.tol, known_extent=self._extent, bias_growth=2.0)
        near_tiles = min(key.tiles, self._widths.get(query, key.tiles))
        is_lifted = is_lift_exact(inputs, query.clouds * query.padded * near_tiles * TILE)
        self._extent = inputs.measured_extent
        return is_lifted and query in self._widths

    def _is_due(self, inputs: Inputs, name: str, passes: float) -> bool:
        """Return whether to call the loops instead of so many passes of plain torch; always if asked for by name."""
        loop = _loop(inputs, name)
        if self._backend == "native" or patience(loop) == 0:
            return True
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        num_tiles, _ = plain.count_near(query, key, inputs.sigma, inputs.tol, _SAMPLE)
        compared = query.clouds * query.tiles * key.tiles  # pairs of tiles, each at the cost of some pairs of points
        return is_due(loop, passes * plain.seconds_for(TILE**2 * num_tiles + TILE * compared, query.dims))

    @property
    def transposed(self) -> "Tiles":
        return Tiles(self._key, self._query, self._backend, self._is_strict, self._widths)

    @property
    def for_gradients(self) -> "Tiles":
        return Tiles(self._query, self._key, self._backend, False, self._widths)

    def can_differentiate(self, inputs: Inputs) -> bool:
        backend = self._backend_for(inputs)
        if backend not in ("native", "triton") or self.not_supported_reasons(inputs):
            return False
        return backend == "triton" or self._is_due(inputs, "differentiate near", _PASSES_OF_GRADIENTS)

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        if self._backend_for(inputs) == "triton":
            on_query, on_key, cutoff = self._on_device(inputs)
            return device.differentiate(on_query, on_key, inputs.sigma, inputs.bias, terms, cutoff)
        query, key = self._query.tiling(inputs.dtype), self._key.tiling(inputs.dtype)
        sums = gaussian.differentiate(query, key, inputs.sigma, inputs.bias, terms, inputs.tol)
        _loop(inputs, "differentiate near").remember()
        return sums


def _loop(inputs: Inputs, name: str) -> Loop:
    return gaussian.loop_of(name, inputs.dtype, inputs.query.shape[-1])
