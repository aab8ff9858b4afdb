"""The `sdpa` backend: the fused kernels of torch, called below the public function, where they return the lse.

`F.scaled_dot_product_attention` drops the lse and, for queries and values of different widths, silently computes the
N × N matrix on a CPU. The operators beneath it do neither: CPU flash (float32, float64), CUDA memory-efficient
(float32) and CUDA flash (16 bits, with the split lift). On devices that only have the public function, the lse follows
from a sink key (`softmax_only`).
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention import dot_product
from qattn.attention.dot_product import DotProductBackend, pair_sums_by
from qattn.attention.engine import Fused
from qattn.attention.inputs import Inputs
from qattn.attention.softmax_only import attend_with_sink
from qattn.lift import lift_full, pad

__all__ = ["Sdpa"]


class Sdpa(DotProductBackend, Fused):
    """Lifted scores in the kernels of torch, all in the layout (B, heads = 1, N, E).

    Gradients come from the backward of the same kernels, in float32 or float64. That of the 16-bit kernel would round
    products with coordinates, which cancel, to 16 bits.
    """

    name: ClassVar[str] = "sdpa"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-11,  # cancellation of ½(‖q‖ + ‖k‖)² ≤ 200
        torch.float32: 2e-4,  # the same, in 3×TF32 on CUDA
        torch.float16: 2e-3,  # out rounded to its dtype; on CUDA the weights are too
        torch.bfloat16: 2e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        device = inputs.device.type
        reasons = []
        if device not in ("cpu", "cuda", "mps"):
            reasons.append(f"device is {device} (takes cpu, cuda, mps)")
        if device in ("cuda", "mps") and inputs.dtype == torch.float64:
            reasons.append(f"float64 on {device} (takes float32, float16, bfloat16)")
        if device == "cuda" and not reasons:
            width = dot_product.width(inputs, split=_takes_flash(inputs), multiple=8)
            if _takes_flash(inputs) and width > 256:
                reasons.append(f"lifted width {width} (takes up to 256)")
            if max(inputs.query.shape[1], inputs.key.shape[1]) * width >= 2**31:
                reasons.append(f"more rows of width {width} than its 32-bit offsets reach")
        return reasons + self.reasons_of_lifting(inputs)

    def is_split(self, inputs: Inputs) -> bool:
        return inputs.device.type == "cuda" and _takes_flash(inputs)

    def attend(self, inputs: Inputs) -> Attended:
        if inputs.device.type == "cpu":
            return _cpu_flash(inputs)
        if inputs.device.type == "cuda":
            return _cuda_flash(inputs) if _takes_flash(inputs) else _cuda_efficient(inputs)
        return _public(inputs)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return inputs.device.type == "cpu" or (inputs.device.type == "cuda" and not _takes_flash(inputs))

    def is_direct(self, inputs: Inputs) -> bool:
        return False

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        backward = _cpu_flash_backward if inputs.device.type == "cpu" else _cuda_efficient_backward
        return pair_sums_by(backward, inputs, terms)


def _takes_flash(inputs: Inputs) -> bool:
    return dot_product.wants_sixteen_bits(inputs) and torch.cuda.get_device_capability(inputs.device) >= (8, 0)


def _cpu_flash(inputs: Inputs) -> Attended:
    # q, k and v must have one width; the matrix products are fast at multiples of 16.
    lifted = dot_product.prepare(inputs, split=False, multiple=16)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        lifted.query[:, None], lifted.key[:, None], lifted.value[:, None], scale=1.0
    )
    return lifted.attended(out[:, 0], lse[:, 0])


def _cpu_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cotangents of query, key and value (B, ·, E), for averages that are 0."""
    tensors = [x[:, None] for x in (grad, query, key, value, torch.zeros_like(grad), lse)]
    cotangents = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, False, scale=1.0)
    return tuple(x[:, 0] for x in cotangents)


def _cuda_efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cotangents of query, key and value (B, ·, E), for averages that are 0."""
    rows = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel reads whole blocks
    tensors = [x[:, None] for x in (grad, query, key, value)]
    random = torch.zeros((), dtype=torch.int64, device=grad.device)  # for dropout, of which there is none
    *cotangents, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *tensors, None, torch.zeros_like(tensors[0]), rows[:, None], random, random, 0.0,
        [True, True, True, False], False, scale=1.0,
    )  # fmt: skip
    return tuple(x[:, 0] for x in cotangents)


def _cuda_efficient(inputs: Inputs) -> Attended:
    lifted = dot_product.prepare(inputs, split=False, multiple=8)
    # The kernel has no mode for lse alone, but values may be narrower than keys: four channels at the least.
    value = lifted.value[..., : -(-max(inputs.channels, 4) // 4) * 4]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        lifted.query[:, None], lifted.key[:, None], value[:, None], None, True, scale=1.0
    )
    return lifted.attended(out[:, 0], lse[:, 0])


def _cuda_flash(inputs: Inputs) -> Attended:
    lifted = dot_product.prepare(inputs, split=True, multiple=8)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        lifted.query[:, None], lifted.key[:, None], lifted.value[:, None], scale=1.0
    )
    return lifted.attended(out[:, 0], lse[:, 0])


def _public(inputs: Inputs) -> Attended:
    """Attend with the public function: the sink is one more key, and its score one more coordinate of the query."""
    bias = None if inputs.bias is None else inputs.bias.to(inputs.dtype)
    query, key = lift_full(*inputs.embedded, bias)
    _, M, E = key.shape  # E = D + 2
    key = torch.nn.functional.pad(key, (0, 1, 0, 1))
    key[:, M, E] = 1

    def average(sink: Tensor, value: Tensor) -> Tensor:
        lifted = torch.cat([query, sink[..., None]], dim=-1)  # (B, N, D + 3)
        width = max(lifted.shape[-1], value.shape[-1])  # with different widths a CPU computes the N × N matrix
        q, k, v = (pad(x, width)[:, None] for x in (lifted, key, value))
        out = scaled_dot_product_attention(q, k, v, scale=1.0)
        return out[:, 0, :, : value.shape[-1]]

    return attend_with_sink(inputs, average)
