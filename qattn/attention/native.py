"""The `native` backend: loops of our own for CPUs, compiled by Numba, on direct differences of points.

There is no lift, and so no cancellation. The loops use as many threads as torch does. They are compiled for each dtype
and dimension as soon as compiling pays off; until then `Plain` computes. The machine code is cached on disk.
"""

from typing import ClassVar

import torch

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.engine import Backend, Fused
from qattn.attention.inputs import Inputs
from qattn.tiles import gaussian, plain
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.meanwhile import Loop, is_due

__all__ = ["Native", "Plain"]

_TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
    torch.float16: 1e-3,  # the same, and out rounded to its dtype
    torch.bfloat16: 1e-2,
}


class Native(Backend, Fused):
    """Tiles of queries against tiles of keys."""

    name: ClassVar[str] = "native"
    tolerance: ClassVar[dict[torch.dtype, float]] = _TOLERANCE

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
        """Return whether to do a task here: its loops are compiled, or `Plain` has taken so long that compiling pays.

        Args:
            inputs: Inputs that this backend supports.
            task: "attend" or "differentiate".
        """
        pairs = inputs.query.shape[0] * inputs.query.shape[1] * inputs.key.shape[1]
        return is_due(_loop(inputs, task), plain.seconds_for(pairs, inputs.query.shape[-1]))

    def attend(self, inputs: Inputs) -> Attended:
        attended = gaussian.attend(*inputs.tilings, inputs.sigma, inputs.value, inputs.bias)
        _loop(inputs, "attend").remember()
        return attended

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        sums = gaussian.differentiate(*inputs.tilings, inputs.sigma, inputs.bias, terms)
        _loop(inputs, "differentiate").remember()
        return sums


class Plain(Backend):
    """The same tiles in plain torch, ten times as slow, in place of `Native` until it pays to compile its loops."""

    name: ClassVar[str] = "plain"
    tolerance: ClassVar[dict[torch.dtype, float]] = _TOLERANCE

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []  # it takes what `Native` does

    def attend(self, inputs: Inputs) -> Attended:
        return plain.attend(*inputs.tilings, inputs.sigma, inputs.value, inputs.bias)


def _loop(inputs: Inputs, name: str) -> Loop:
    return gaussian.loop_of(name, inputs.dtype, inputs.query.shape[-1])
