"""The `reference` backend: the specification of `attend`, in plain torch, for any device, dtype and score."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qattn._autocast import product
from qattn.attended import Attended
from qattn.attention.engine import Backend
from qattn.attention.inputs import Inputs
from qattn.attention.score import pair_score

__all__ = ["Reference"]

_PAIRS = 2**17  # scores in memory at a time: 512 kB in float32, which fits a cache


class Reference(Backend):
    """Attention to all keys, over chunks of rows, so that memory is O(N + M)."""

    name: ClassVar[str] = "reference"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return [] if inputs.blocks is None else ["lists of blocks"]

    def attend(self, inputs: Inputs) -> Attended:
        key = inputs.key.to(inputs.dtype)[:, None].unbind(-1)  # D × (B, 1, M)
        bias = None if inputs.bias is None else inputs.bias.to(inputs.dtype)[:, None]  # (B, 1, M)
        never = torch.zeros((), dtype=torch.bool, device=inputs.device)
        is_empty = never if bias is None else (bias == -torch.inf).all(-1)  # (B, 1)
        value = None if inputs.value is None else inputs.value.to(inputs.dtype)
        sigma = None if inputs.sigma is None else inputs.sigma.to(inputs.dtype)[:, None, None]

        def rows(query: Tensor) -> list[Tensor]:
            scores = pair_score(inputs.score, query.to(inputs.dtype)[:, :, None].unbind(-1), key, sigma)  # (B, n, M)
            if bias is not None:
                scores = scores + bias
            # Without the first `where`, the derivative of the logarithm of an empty sum would be NaN.
            lse = torch.where(is_empty[..., None], 0, scores).logsumexp(-1)  # (B, n)
            lse = torch.where(is_empty, -torch.inf, lse)
            if value is None:
                return [lse]
            shift = torch.where(lse == -torch.inf, 0, lse)  # rows without keys have weights 0, not exp(−inf + inf)
            return [lse, product(torch.exp(scores - shift[..., None]), value)]

        B, N, _ = inputs.query.shape
        lse = torch.empty(B, N, dtype=inputs.dtype, device=inputs.device)
        out = None if inputs.value is None else lse.new_empty(B, N, inputs.channels, dtype=inputs.value.dtype)
        results = [lse] if out is None else [lse, out]
        chunk = max(1, _PAIRS // (B * inputs.key.shape[1]))
        for begin in range(0, N, chunk):
            query = inputs.query[:, begin : begin + chunk]
            # Gradients of scores other than the Gaussian one recompute the chunks instead of storing them.
            parts = checkpoint(rows, query, use_reentrant=False) if inputs.needs_gradients else rows(query)
            for result, part in zip(results, parts, strict=True):
                result[:, begin : begin + chunk] = part
        return Attended(out, lse)
