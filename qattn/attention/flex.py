"""The `flex` backend: FlexAttention, compiled, with any score.

The score is computed from the coordinates themselves inside the kernel, so there is no lift and nothing cancels; the
dot product that FlexAttention insists on is over zeros. On CUDA the kernel returns its lse. The CPU kernel does not,
and gets it from a sink key.
"""

import functools
import shutil
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Backend
from qattn.attention.inputs import Inputs
from qattn.attention.score import pair_score
from qattn.attention.sink import attend_with_sink

__all__ = ["BlockLists", "Flex", "attend_blocks"]

_BLOCK = 128
_MOST_BLOCKS = 64  # of keys, larger ones for more keys: the lists stay O(N)
_WIDTH = 16  # the least the CUDA kernel takes


class BlockLists(NamedTuple):
    """Which blocks of keys each block of queries attends to: blocks[b, i, : counts[b, i]]."""

    counts: Tensor  # (B, rows) int32
    blocks: Tensor  # (B, rows, width) int32
    size: int  # of a block


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
        return attend_blocks(inputs, None)


def attend_blocks(inputs: Inputs, lists: BlockLists | None) -> Attended:
    """Attention over the listed blocks; over all of them if None."""
    return _cuda(inputs, lists) if inputs.device.type == "cuda" else _cpu(inputs, lists)


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


def _listed_blocks(lists: BlockLists, N: int, M: int) -> Any:
    """The listed blocks, all of them full."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, blocks = lists.counts[:, None], lists.blocks[:, None]  # (B, 1, rows[, width])
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(blocks), counts, blocks,
        BLOCK_SIZE=(lists.size, lists.size), seq_lengths=(N, M), compute_q_blocks=False,
    )  # fmt: skip


def _with_sink(lists: BlockLists, M: int) -> BlockLists:
    """The lists with the block of the key M, the sink, in each of them, and as wide as the CPU kernel wants them."""
    width, sink = M // lists.size + 1, M // lists.size
    counts, blocks = lists.counts, torch.nn.functional.pad(lists.blocks, (0, width - lists.blocks.shape[-1]))
    is_listed = torch.arange(width) < counts[..., None]
    is_missing = ~((blocks == sink) & is_listed).any(-1)
    last = (counts - (~is_missing).int()).long()[..., None]  # where there is room, or any place that keeps it
    placed = blocks.scatter(-1, last, torch.where(is_missing[..., None], sink, blocks.gather(-1, last)))
    return BlockLists(counts + is_missing.int(), placed, lists.size)


def _flex(inputs: Inputs, value: Tensor, sink: Tensor | None, lists: BlockLists | None, **options: Any) -> Any:
    """Calls the kernel; with a sink (B, N), the key after the last scores sink_i."""
    B, N, D = inputs.query.shape
    M = inputs.key.shape[1]
    score = inputs.score
    # Tensors of their own, without gradients: the CPU kernel trips over shared ones, and Dynamo over those of a graph.
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


def _cpu(inputs: Inputs, lists: BlockLists | None) -> Attended:
    listed = None if lists is None else _with_sink(lists, inputs.key.shape[1])
    return attend_with_sink(inputs, lambda sink, value: _flex(inputs, value, sink, listed)[:, 0])


def _cuda(inputs: Inputs, lists: BlockLists | None) -> Attended:
    from torch.nn.attention.flex_attention import AuxRequest

    width = max(_WIDTH, inputs.channels)
    if inputs.value is None:
        value = inputs.key.new_zeros(*inputs.key.shape[:2], width, dtype=inputs.dtype)
    else:
        value = torch.nn.functional.pad(inputs.value.to(inputs.dtype), (0, width - inputs.channels))
    # Else a global switch could turn the product with the values into tf32.
    kernel: dict[str, Any] = {"FLOAT32_PRECISION": "'ieee'"}
    if lists is not None:  # the kernel's own blocks must divide those of the lists
        kernel |= {"BLOCK_M": lists.size, "BLOCK_N": lists.size}
    out, aux = _flex(inputs, value, None, lists, return_aux=AuxRequest(lse=True), kernel_options=kernel)
    if inputs.value is None:
        return Attended(None, aux.lse[:, 0])
    return Attended(out[:, 0, :, : inputs.channels].to(inputs.value.dtype), aux.lse[:, 0])
