"""The `native` backend: loops of our own for CPUs, compiled by Numba, on direct differences of points.

There is no lift, and so no cancellation. The loops use as many threads as torch does. They are compiled for each dtype
and dimension, once others have computed so many pairs that it pays, and the machine code is cached on disk.
"""

from typing import ClassVar

import torch

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.engine import Backend, Fused
from qattn.attention.inputs import Inputs
from qattn.tiles import gaussian
from qattn.tiles.cache import is_compiled, remember
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.tiling import Tiling

__all__ = ["Native"]


class Native(Backend, Fused):
    """Tiles of queries against tiles of keys."""

    name: ClassVar[str] = "native"
    # Pairs that others may compute before it compiles: some seconds, as compiling takes.
    meanwhile: ClassVar[int] = 2**28
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def __init__(self) -> None:
        self._pairs = 0  # that others have computed

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if inputs.device.type != "cpu":
            reasons.append(f"device is {inputs.device.type} (takes cpu)")
        if not inputs.is_gaussian:
            reasons.append("the score is not the Gaussian one, for which the loops are compiled")
        if inputs.blocks is not None:
            reasons.append("lists of blocks")
        if reason := why_not_compiled():
            reasons.append(reason)
        return reasons

    def is_due(self, inputs: Inputs, task: str) -> bool:
        """Return whether to attend or to differentiate here: it is compiled, or others have computed many pairs since.

        On a new machine, a few small clouds are done by others before a compiler would be. The total is at most twice
        as long as if it were known how many pairs will come.

        Args:
            inputs: Inputs that this backend supports.
            task: "attend" or "differentiate".
        """
        if is_compiled(_task(inputs, task)):
            return True
        self._pairs += inputs.query.shape[0] * inputs.query.shape[1] * inputs.key.shape[1]
        return self._pairs > self.meanwhile

    def attend(self, inputs: Inputs) -> Attended:
        attended = gaussian.attend(*_tilings(inputs), inputs.sigma, inputs.value, inputs.bias)
        remember(_task(inputs, "attend"))
        return attended

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        sums = gaussian.differentiate(*_tilings(inputs), inputs.sigma, inputs.bias, terms)
        remember(_task(inputs, "differentiate"))
        return sums


def _task(inputs: Inputs, name: str) -> str:
    """Return the name of the loops that inputs need."""
    return f"{name}-{inputs.dtype}-{inputs.query.shape[-1]}"


def _tilings(inputs: Inputs) -> tuple[Tiling, Tiling]:
    key = Tiling(inputs.key.to(inputs.dtype))
    return key if inputs.query is inputs.key else Tiling(inputs.query.to(inputs.dtype)), key
