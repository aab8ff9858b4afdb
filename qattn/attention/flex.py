"""The `flex` backend: FlexAttention, compiled, with any score.

The score is computed from the coordinates themselves inside the kernel, so there is no lift and nothing cancels; the
dot product that FlexAttention insists on is over zeros. On CUDA the kernel returns its lse. The CPU kernel does not,
and gets it from a sink key.
"""

import functools
import shutil
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Backend
from qattn.attention.inputs import Inputs
from qattn.attention.sink import attend_with_sink

__all__ = ["Flex"]

_BLOCK = 128
_MOST_BLOCKS = 64  # of keys, larger ones for more keys: the lists stay O(N)
_WIDTH = 16  # the least the CUDA kernel takes


class Flex(Backend):
    """One compiled kernel a score."""

    name: ClassVar[str] = "flex"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200, and an exp good to 20 units
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if inputs.device.type not in ("cpu", "cuda"):
            reasons.append(f"device is {inputs.device.type} (takes cpu, cuda)")
        if inputs.dtype == torch.float64:
            reasons.append("float64 (takes float32, float16, bfloat16)")
        if inputs.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            reasons.append("no C++ compiler was found, which torch.compile needs on a CPU")
        if inputs.needs_gradients and not inputs.is_gaussian:
            reasons.append("gradients of another score than the Gaussian one (`reference` has them)")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        return _cuda(inputs) if inputs.device.type == "cuda" else _cpu(inputs)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention for fixed shapes (its CPU kernel compiles for no others), and never its N × N eager version."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=2**16):  # each shape compiles once
            return compiled(*args, **kwargs)

    return call


def _all_blocks(N: int, M: int, device: torch.device) -> Any:
    """Every block of keys for every block of queries. By hand: `create_block_mask` would make an N × M matrix."""
    from torch.nn.attention.flex_attention import BlockMask

    size = _BLOCK * -(-M // (_BLOCK * _MOST_BLOCKS))
    rows, columns = -(-N // _BLOCK), -(-M // size)
    none = torch.zeros(1, 1, rows, dtype=torch.int32, device=device)
    indices = torch.arange(columns, dtype=torch.int32, device=device).repeat(1, 1, rows, 1)
    # All blocks are full, the list of partial ones is empty. (It must be a tensor of its own: the CPU kernel trips
    # over a shared one.)
    return BlockMask.from_kv_blocks(
        none, torch.zeros_like(indices), none + columns, indices,
        BLOCK_SIZE=(_BLOCK, size), seq_lengths=(N, M), compute_q_blocks=False,
    )  # fmt: skip


def _flex(inputs: Inputs, value: Tensor, sink: Tensor | None, **options: Any) -> Any:
    """Calls the kernel; with a sink (B, N), the key after the last scores sink_i."""
    B, N, D = inputs.query.shape
    M = inputs.key.shape[1]
    score = inputs.score
    query, key = inputs.query.to(inputs.dtype), inputs.key.to(inputs.dtype)
    bias = inputs.key.new_zeros(B, M) if inputs.bias is None else inputs.bias.to(inputs.dtype)

    def pair(_: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score([query[b, i, c] for c in range(D)], [key[b, j, c] for c in range(D)]) + bias[b, j]

    def pair_or_sink(dot: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert sink is not None
        return torch.where(j < M, pair(dot, b, h, i, j.clamp(max=M - 1)), sink[b, i])

    zero = query.new_zeros(1, 1, 1, 1)
    rows, columns = zero.expand(B, 1, N, _WIDTH).contiguous(), zero.expand(B, 1, value.shape[1], _WIDTH).contiguous()
    blocks = _all_blocks(N, value.shape[1], inputs.device)
    score_mod = pair if sink is None else pair_or_sink
    return _compiled()(rows, columns, value[:, None], score_mod=score_mod, block_mask=blocks, scale=1.0, **options)


def _cpu(inputs: Inputs) -> Attended:
    return attend_with_sink(inputs, lambda sink, value: _flex(inputs, value, sink)[:, 0])


def _cuda(inputs: Inputs) -> Attended:
    from torch.nn.attention.flex_attention import AuxRequest

    width = max(_WIDTH, inputs.channels)
    if inputs.value is None:
        value = inputs.key.new_zeros(*inputs.key.shape[:2], width, dtype=inputs.dtype)
    else:
        value = torch.nn.functional.pad(inputs.value.to(inputs.dtype), (0, width - inputs.channels))
    precise = {"FLOAT32_PRECISION": "'ieee'"}  # else a global switch could turn the product with the values into tf32
    out, aux = _flex(inputs, value, None, return_aux=AuxRequest(lse=True), kernel_options=precise)
    if inputs.value is None:
        return Attended(None, aux.lse[:, 0])
    return Attended(out[:, 0, :, : inputs.channels].to(inputs.value.dtype), aux.lse[:, 0])
