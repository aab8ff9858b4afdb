"""The `native` backend: loops of our own for CPUs, compiled by Numba, on direct differences of points.

There is no lift, and so no cancellation. The loops use as many threads as torch does. They are compiled for each dtype
and dimension, and the machine code is cached on disk.
"""

from typing import ClassVar

import torch

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.engine import Backend, Fused
from qattn.attention.inputs import Inputs
from qattn.tiles import gaussian
from qattn.tiles.compiled import why_not_compiled

__all__ = ["Native"]


class Native(Backend, Fused):
    """Tiles of queries against tiles of keys.

    Args:
        compile_now: Whether to compile loops at their first call. If False, plain torch computes the same, ten times as
            slow, until it pays to compile them.
    """

    name: ClassVar[str] = "native"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def __init__(self, compile_now: bool = True) -> None:
        self._compile_now = compile_now

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

    def attend(self, inputs: Inputs) -> Attended:
        return gaussian.attend(*inputs.tilings, inputs.sigma, inputs.value, inputs.bias, compile_now=self._compile_now)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        return gaussian.differentiate(*inputs.tilings, inputs.sigma, inputs.bias, terms, compile_now=self._compile_now)
