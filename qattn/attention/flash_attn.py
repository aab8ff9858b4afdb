"""The `flash_attn` backend: the FlashAttention packages, called with the split lift of the points.

FlashAttention takes 16-bit numbers only. Points may still be float32: the split lift passes them in 16-bit parts, and
the lse is nearly as exact as in float32. Values must be 16-bit, because the kernel rounds the weights that multiply
them.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qattn._types import dtype_name
from qattn.attended import Attended
from qattn.attention import dot_product
from qattn.attention.dot_product import DotProductBackend
from qattn.attention.inputs import Inputs

__all__ = ["FlashAttn"]


class Package(NamedTuple):
    """A FlashAttention package.

    Attributes:
        module: Module that holds its `flash_attn_func`.
        capabilities: Major compute capabilities of the GPUs that it runs on.
        max_width: Largest width of a head.
        lse: Keyword arguments that make `flash_attn_func` return the lse.
    """

    module: str
    capabilities: tuple[int, ...]
    max_width: int
    lse: dict[str, bool]


PACKAGES = (  # newest first: FA4, FA3, FA2
    Package("flash_attn.cute", (8, 9, 10, 11, 12), 128, {"return_lse": True}),
    Package("flash_attn_interface", (9,), 256, {"return_attn_probs": True}),
    Package("flash_attn", (8, 9, 10, 12), 256, {"return_attn_probs": True}),  # no dropout, so no N × N probabilities
)


FlashAttnFunc = Callable[..., tuple[Tensor, ...]]


@functools.cache
def _load(module: str) -> FlashAttnFunc | str:
    """Import the `flash_attn_func` of a module, or return why that failed: "" if the package is not installed."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return ""
    try:
        function: FlashAttnFunc = importlib.import_module(module).flash_attn_func
    except (ImportError, AttributeError, OSError) as error:
        return f"{module} is installed, but does not import ({type(error).__name__}: {error})"
    return function


def installed() -> list[Package]:
    """Return the FlashAttention packages that can be imported."""
    return [package for package in PACKAGES if not isinstance(_load(package.module), str)]


def _why_not_installed() -> str:
    failures = [reason for package in PACKAGES if isinstance(reason := _load(package.module), str) and reason]
    return (
        failures[-1]
        if failures
        else "no FlashAttention package is installed (`pip install flash-attn --no-build-isolation`)"
    )


class FlashAttn(DotProductBackend):
    """FA4, FA3 or FA2: the first package that is installed and supports the GPU."""

    name: ClassVar[str] = "flash_attn"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float32: 5e-5,  # lse: cancellation of ½(‖q‖ + ‖k‖)² ≤ 200; out is never float32
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
            dtype = dtype_name(inputs.value.dtype)
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
                max_width := max(p.max_width for p in fitting)
            ):
                reasons.append(f"lifted width {width} (takes up to {max_width})")
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


def attend_with(package: Package, flash_attn_func: FlashAttnFunc, inputs: Inputs) -> Attended:
    """Attend with the function of a package, in its layout (B, N, heads = 1, E) with lse (B, 1, N)."""
    lifted = dot_product.prepare(inputs, split=True, multiple=8)
    layout = [x[:, :, None] for x in (lifted.query, lifted.key, lifted.value)]
    out, lse, *_ = flash_attn_func(*layout, softmax_scale=1.0, **package.lse)
    return lifted.attended(out[:, :, 0], lse[:, 0])
