"""The `flash_attn` backend: the FlashAttention packages, by the split lift.

FlashAttention takes 16-bit numbers only. Points may be float32 all the same: the split lift hands them over in parts,
and the lse is nearly as exact as in float32. Values must be 16-bit, because the kernel rounds the weights that multiply
them.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention import dot_product
from qattn.attention.dot_product import DotProductBackend
from qattn.attention.inputs import Inputs

__all__ = ["FlashAttn"]


class Package(NamedTuple):
    """One FlashAttention package: where its `flash_attn_func` is, what it runs on, and how it is asked for the lse."""

    module: str
    capabilities: tuple[int, ...]  # major compute capabilities
    max_width: int
    lse: dict[str, bool]


PACKAGES = (  # newest first: FA4, FA3, FA2
    Package("flash_attn.cute", (9, 10, 11), 128, {"return_lse": True}),
    Package("flash_attn_interface", (9,), 256, {"return_attn_probs": True}),
    Package("flash_attn", (8, 9, 10, 12), 256, {"return_attn_probs": True}),  # no dropout, so no N × N probabilities
)


@functools.cache
def _load(module: str) -> Callable[..., Any] | str:
    """A module's `flash_attn_func`, or why there is none: one that is on the path may still not import."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return ""
    try:
        function: Callable[..., Any] = importlib.import_module(module).flash_attn_func
    except (ImportError, AttributeError, OSError) as error:
        return f"{module} is there, but does not import ({type(error).__name__}: {error})"
    return function


def installed() -> list[Package]:
    """The FlashAttention packages that import here."""
    return [package for package in PACKAGES if not isinstance(_load(package.module), str)]


def _why_not_installed() -> str:
    broken = [why for package in PACKAGES if isinstance(why := _load(package.module), str) and why]
    return (
        broken[-1]
        if broken
        else "no FlashAttention package is installed (`pip install flash-attn --no-build-isolation`)"
    )


class FlashAttn(DotProductBackend):
    """FA4, FA3 or FA2: the first that is installed and fits the GPU."""

    name: ClassVar[str] = "flash_attn"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float32: 5e-5,  # of lse, cancellation of ½(‖q‖ + ‖k‖)² ≤ 200; there is no float32 out
        torch.float16: 2e-3,  # weights and values rounded to 11 bits
        torch.bfloat16: 2e-2,  # out rounded to 8 bits
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        packages = installed()
        if not packages:
            reasons.append(_why_not_installed())
        if inputs.device.type != "cuda":
            reasons.append(f"device is {inputs.device.type} (takes cuda)")
        if inputs.query.dtype == torch.float64:
            reasons.append("points are float64 (takes float32, float16, bfloat16)")
        if inputs.value is not None and not dot_product.wants_sixteen_bits(inputs):
            dtype = str(inputs.value.dtype).removeprefix("torch.")
            reasons.append(
                f"values are {dtype}, and it rounds their weights to 16 bits (takes float16, bfloat16 or no values)"
            )
        if inputs.query.shape[0] > 65535:
            reasons.append(f"batch of {inputs.query.shape[0]} (takes up to 65535)")
        if packages and inputs.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(inputs.device)
            if not (fitting := [package for package in packages if major in package.capabilities]):
                names = ", ".join(package.module for package in packages)
                reasons.append(f"{names} does not run on compute capability {major}.{minor}")
            elif (width := dot_product.width(inputs, split=True, multiple=8)) > (
                most := max(p.max_width for p in fitting)
            ):
                reasons.append(f"lifted width {width} (takes up to {most})")
        return reasons + self.reasons_of_lifting(inputs)

    def is_split(self, inputs: Inputs) -> bool:
        return True

    def attend(self, inputs: Inputs) -> Attended:
        major, _ = torch.cuda.get_device_capability(inputs.device)
        width = dot_product.width(inputs, split=True, multiple=8)
        package = next(p for p in installed() if major in p.capabilities and width <= p.max_width)
        function = _load(package.module)
        assert not isinstance(function, str)
        return attend_with(package, function, inputs)


def attend_with(package: Package, flash_attn_func: Callable[..., Any], inputs: Inputs) -> Attended:
    """Attention by a package's function, in its layout (B, N, heads = 1, E) with lse (B, 1, N)."""
    given = dot_product.prepare(inputs, split=True, multiple=8)
    layout: list[Tensor] = [x[:, :, None] for x in (given.query, given.key, given.value)]
    out, lse, *_ = flash_attn_func(*layout, softmax_scale=1.0, **package.lse)
    return given.attended(out[:, :, 0], lse[:, 0])
