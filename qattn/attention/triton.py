"""The `triton` backend: kernels of our own for GPUs, compiled by Triton, on direct differences of points.

The counterpart of `native` for GPUs: there is no lift, and so no cancellation. With many pairs, however, tensor cores
compute the exponents from lifted points, if the rounding error of the lift is within the tolerance. The kernels are
compiled on their first use for each dimension and number of channels.
"""

from typing import ClassVar

import torch

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.engine import Backend, Fused
from qattn.attention.inputs import Inputs
from qattn.attention.tensor_cores import is_lift_exact
from qattn.tiles import device
from qattn.tiles.device import DIMENSIONS, DeviceTiling

__all__ = ["AMD", "Triton", "why_not_this_gpu"]

AMD = ("gfx90a", "gfx942", "gfx950")  # for which `make conformance` compiles the kernels
_MAX_POINTS = 2**26  # rows of up to 32 channels that 32-bit offsets reach


def why_not_this_gpu(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on a model of GPU, or None."""
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return None if name in AMD else f"of AMD it takes {', '.join(AMD)}, this GPU is {name}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else "it needs compute capability 8.0, this GPU has {}.{}".format(*capability)


class Triton(Backend, Fused):
    """Tiles of queries against tiles of keys, on GPUs of NVIDIA and AMD whose tensor cores take float32 numbers."""

    name: ClassVar[str] = "triton"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200; many pairs may have the rounding of a lift
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if reason := device.why_not_installed():
            reasons.append(reason)
        if inputs.device.type == "cuda":
            if reason := why_not_this_gpu(inputs.device):
                reasons.append(reason)
        elif not (inputs.device.type == "cpu" and device.is_interpreted()):
            reasons.append(f"device is {inputs.device.type} (takes cuda)")
        if inputs.dtype == torch.float64:
            reasons.append("float64 (takes float32, float16, bfloat16)")
        if not inputs.is_gaussian:
            reasons.append("the score is not the Gaussian one, for which the kernels are written")
        if inputs.blocks is not None:
            reasons.append("lists of blocks")
        if inputs.query.shape[-1] > DIMENSIONS:
            reasons.append(f"{inputs.query.shape[-1]} dimensions (takes up to {DIMENSIONS})")
        if max(inputs.query.shape[1], inputs.key.shape[1]) >= _MAX_POINTS:
            reasons.append(f"more than {_MAX_POINTS} points, which its 32-bit offsets do not reach")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        is_lifted = is_lift_exact(inputs, len(inputs.query) * inputs.query.shape[1] * inputs.key.shape[1])
        return device.attend(*_tilings(inputs), inputs.sigma, inputs.value, inputs.bias, is_lifted=is_lifted)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        return device.differentiate(*_tilings(inputs), inputs.sigma, inputs.bias, terms)


def _tilings(inputs: Inputs) -> tuple[DeviceTiling, DeviceTiling]:
    key = DeviceTiling(inputs.key)
    return key if inputs.query is inputs.key else DeviceTiling(inputs.query), key
