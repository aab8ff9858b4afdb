"""The `flex` backend: compiled FlexAttention, with any score.

The kernel computes the score from the coordinates themselves, so there is no lift and nothing cancels; the dot product
that FlexAttention always computes is over zeros. On CUDA the kernel returns its lse. On a CPU it does not, and the lse
follows from a sink key (`softmax_only`).
"""

import functools
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from qattn._devices import on_gpu_of
from qattn._versions import why_no_flex
from qattn.attended import Attended
from qattn.attention.engine import Backend
from qattn.attention.inputs import BlockLists, Inputs
from qattn.attention.score import pair_score
from qattn.attention.softmax_only import attend_with_sink

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Flex"]

_BLOCK = 128
_MAX_BLOCKS = 64  # of keys; more keys get larger blocks, so that the lists stay O(N)
_WIDTH = 16  # smallest width that the CUDA kernel takes


class Flex(Backend):
    """FlexAttention, with one compiled kernel per score and shape."""

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
        elif reason := why_no_flex(inputs.device.type):
            reasons.append(reason)
        if inputs.dtype == torch.float64:
            reasons.append("float64 (takes float32, float16, bfloat16)")
        if inputs.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            reasons.append("no C++ compiler was found, which torch.compile needs on a CPU")
        if inputs.needs_gradients and not inputs.is_gaussian:
            reasons.append("gradients of a score other than the Gaussian one (`reference` has them)")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        out, lse = _cuda(inputs) if inputs.device.type == "cuda" else _cpu(inputs)
        if inputs.bias is None:
            return Attended(out, lse)
        is_empty = (inputs.bias == -torch.inf).all(-1, keepdim=True)  # there the kernel divides 0 by 0
        out = None if out is None else torch.where(is_empty[..., None], 0, out)
        return Attended(out, torch.where(is_empty, -torch.inf, lse))


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return FlexAttention compiled for fixed shapes, as its CPU kernel requires; never the N × N eager version."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=2**16):  # every shape is compiled once
            return compiled(*args, **kwargs)

    return call


def _all_blocks(N: int, M: int, device: torch.device) -> "BlockMask":
    """Make the mask of all blocks of keys for every block of queries, without the N × M matrix of `create_block_mask`.

    All blocks are full and the list of partial blocks is empty. That list needs a tensor of its own: the CPU kernel
    fails on shared ones.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size = _BLOCK * -(-M // (_BLOCK * _MAX_BLOCKS))
    rows, columns = -(-N // _BLOCK), -(-M // size)
    none = torch.zeros(1, 1, rows, dtype=torch.int32, device=device)
    indices = torch.arange(columns, dtype=torch.int32, device=device).repeat(1, 1, rows, 1)
    return BlockMask.from_kv_blocks(
        none, torch.zeros_like(indices), none + columns, indices,
        BLOCK_SIZE=(_BLOCK, size), seq_lengths=(N, M), compute_q_blocks=False,
    )  # fmt: skip


def _listed_blocks(lists: BlockLists, N: int, M: int) -> "BlockMask":
    """Make the mask of the listed blocks, all of them full."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, blocks = lists.counts[:, None], lists.blocks[:, None]  # (B, 1, rows[, width])
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(blocks), counts, blocks,
        BLOCK_SIZE=(lists.size, lists.size), seq_lengths=(N, M), compute_q_blocks=False,
    )  # fmt: skip


def _with_sink(lists: BlockLists, M: int) -> BlockLists:
    """Add the block of the sink, key number M, to every list, and widen the lists as the CPU kernel requires."""
    width, sink = M // lists.size + 1, M // lists.size
    counts, blocks = lists.counts, torch.nn.functional.pad(lists.blocks, (0, width - lists.blocks.shape[-1]))
    is_listed = torch.arange(width) < counts[..., None]
    is_missing = ~((blocks == sink) & is_listed).any(-1)
    last = (counts - (~is_missing).int()).long()[..., None]  # a free place, or one that is written back unchanged
    placed = blocks.scatter(-1, last, torch.where(is_missing[..., None], sink, blocks.gather(-1, last)))
    return BlockLists(counts + is_missing.int(), placed, lists.size)


def _flex(inputs: Inputs, value: Tensor, sink: Tensor | None, lists: BlockLists | None, **options: Any) -> Any:
    """Call the kernel. With `sink` (B, N), the key after the last one has the score sink_i."""
    B, N, D = inputs.query.shape
    M = inputs.key.shape[1]
    score = inputs.score
    # Copies without gradients: the CPU kernel fails on shared tensors, and Dynamo on those of an autograd graph.
    sigma = None if inputs.sigma is None else inputs.sigma.detach().to(inputs.dtype).clone()
    query, key = inputs.query.detach().to(inputs.dtype), inputs.key.detach().to(inputs.dtype)
    key = key.clone() if inputs.key is inputs.query else key
    bias = inputs.key.new_zeros(B, M) if inputs.bias is None else inputs.bias.detach().to(inputs.dtype)

    def pair(_: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        pair = [query[b, i, c] for c in range(D)], [key[b, j, c] for c in range(D)]
        return pair_score(score, *pair, None if sigma is None else sigma[b]) + bias[b, j]

    def pair_or_sink(dot: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert sink is not None
        return torch.where(j < M, pair(dot, b, h, i, j.clamp(max=M - 1)), sink[b, i])

    zero = query.new_zeros(1, 1, 1, 1)
    rows, columns = zero.expand(B, 1, N, _WIDTH).contiguous(), zero.expand(B, 1, value.shape[1], _WIDTH).contiguous()
    length = value.shape[1]
    blocks = _all_blocks(N, length, inputs.device) if lists is None else _listed_blocks(lists, N, length)
    score_mod = pair if sink is None else pair_or_sink
    return _compiled()(rows, columns, value[:, None], score_mod=score_mod, block_mask=blocks, scale=1.0, **options)


def _cpu(inputs: Inputs) -> Attended:
    listed = None if inputs.blocks is None else _with_sink(inputs.blocks, inputs.key.shape[1])
    return attend_with_sink(inputs, lambda sink, value: _flex(inputs, value, sink, listed)[:, 0])


def _cuda(inputs: Inputs) -> Attended:
    from torch.nn.attention.flex_attention import AuxRequest

    width = max(_WIDTH, inputs.channels)
    if inputs.value is None:
        value = inputs.key.new_zeros(*inputs.key.shape[:2], width, dtype=inputs.dtype)
    else:
        value = torch.nn.functional.pad(inputs.value.to(inputs.dtype), (0, width - inputs.channels))
    # Otherwise a global switch of torch could turn the product with the values into TF32.
    kernel: dict[str, object] = {"FLOAT32_PRECISION": "'ieee'"}
    if inputs.blocks is not None:  # the kernel's own blocks must divide those of the lists
        kernel |= {"BLOCK_M": inputs.blocks.size, "BLOCK_N": inputs.blocks.size}
    with on_gpu_of(value):
        out, aux = _flex(inputs, value, None, inputs.blocks, return_aux=AuxRequest(lse=True), kernel_options=kernel)
    if inputs.value is None:
        return Attended(None, aux.lse[:, 0])
    return Attended(out[:, 0, :, : inputs.channels].to(inputs.value.dtype), aux.lse[:, 0])
