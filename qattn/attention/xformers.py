"""The `xformers` backend: memory-efficient attention with its lse, from `xformers` or its successor `mslk`.

Inputs of float32 use the plain lift, and 16-bit values the split lift.
"""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention import dot_product
from qattn.attention.dot_product import DotProductBackend, pair_sums_by
from qattn.attention.engine import Fused
from qattn.attention.inputs import Inputs

__all__ = ["Xformers"]


@functools.cache
def _load() -> ModuleType | str:
    """Import the `fmha` module, or return why that failed."""
    failures = []
    for package, module in (("mslk", "mslk.attention.fmha"), ("xformers", "xformers.ops.fmha")):
        if importlib.util.find_spec(package) is not None:
            try:
                return importlib.import_module(module)
            except (ImportError, OSError) as error:
                failures.append(f"{module} is installed, but does not import ({type(error).__name__}: {error})")
    return "; ".join(failures) or "xformers is not installed (`pip install xformers`)"


class Xformers(DotProductBackend, Fused):
    """`memory_efficient_attention_forward_requires_grad`, the entry point that returns the lse in every dtype.

    Gradients come from the backward of its float32 kernel, whatever the dtype of the values.
    """

    name: ClassVar[str] = "xformers"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float32: 2e-4,  # cancellation of ½(‖q‖ + ‖k‖)² ≤ 200 in 3×TF32
        torch.float16: 2e-3,  # weights and values rounded to 11 bits
        torch.bfloat16: 2e-2,  # out rounded to 8 bits
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if isinstance(fmha := _load(), str):
            reasons.append(fmha)
        if inputs.device.type != "cuda":
            reasons.append(f"device is {inputs.device.type} (takes cuda)")
        if inputs.dtype == torch.float64:
            reasons.append("float64 (takes float32, float16, bfloat16)")
        if inputs.query.shape[0] > 65535:
            reasons.append(f"batch of {inputs.query.shape[0]} (takes up to 65535)")
        if inputs.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(inputs.device)
            if dot_product.wants_sixteen_bits(inputs) and major < 8:
                reasons.append(f"its 16-bit kernels need compute capability 8.0, this GPU has {major}.{minor}")
            if not dot_product.wants_sixteen_bits(inputs) and (major, minor) > (9, 0):
                reasons.append(f"its float32 kernel stops at compute capability 9.0, this GPU has {major}.{minor}")
        return reasons + self.reasons_of_lifting(inputs)

    def is_split(self, inputs: Inputs) -> bool:
        return dot_product.wants_sixteen_bits(inputs)

    def attend(self, inputs: Inputs) -> Attended:
        fmha = _load()
        assert not isinstance(fmha, str)
        return attend_with(fmha, inputs)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return inputs.dtype == torch.float32

    def is_direct(self, inputs: Inputs) -> bool:
        return False

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        fmha = _load()
        assert not isinstance(fmha, str)
        return pair_sums_by(functools.partial(backward_with, fmha), inputs, terms)


def attend_with(fmha: ModuleType, inputs: Inputs) -> Attended:
    """Attend with an `fmha` module, in its layout (B, N, heads = 1, E) with lse (B, 1, ≥ N)."""
    lifted = dot_product.prepare(inputs, split=dot_product.wants_sixteen_bits(inputs), multiple=8)
    layout = [x[:, :, None] for x in (lifted.query, lifted.key, lifted.value)]
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*layout, scale=1.0)
    return lifted.attended(out[:, :, 0], lse[:, 0])


def backward_with(
    fmha: ModuleType, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cotangents of query, key and value (B, ·, E) with an `fmha` module, for averages that are 0."""
    rows = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel reads whole blocks
    grad, query, key, value = (x[:, :, None] for x in (grad, query, key, value))
    cotangents = fmha.memory_efficient_attention_backward(
        grad, torch.zeros_like(grad), rows[:, None], query, key, value, scale=1.0
    )
    by_query, by_key, by_value = (x[:, :, 0] for x in cotangents)
    return by_query, by_key, by_value
