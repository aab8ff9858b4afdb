"""The `reference` backend: the specification of `attend`, in plain torch, for any device, dtype and score."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qattn.attended import Attended
from qattn.attention.backend import Backend
from qattn.attention.inputs import Inputs

__all__ = ["Reference"]

_PAIRS = 2**22  # scores held at once: 16 MB in float32


class Reference(Backend):
    """Rows in chunks, so that memory is O(N + M)."""

    name: ClassVar[str] = "reference"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def attend(self, inputs: Inputs) -> Attended:
        key = inputs.key.to(inputs.dtype)[:, None].unbind(-1)  # D × (B, 1, M)
        bias = None if inputs.bias is None else inputs.bias.to(inputs.dtype)[:, None]  # (B, 1, M)
        value = None if inputs.value is None else inputs.value.to(inputs.dtype)

        def rows(query: Tensor) -> tuple[Tensor | None, Tensor]:
            scores = inputs.score(query.to(inputs.dtype)[:, :, None].unbind(-1), key)  # (B, n, M)
            if bias is not None:
                scores = scores + bias
            lse = scores.logsumexp(-1)  # (B, n)
            shift = torch.where(lse == -torch.inf, 0, lse)  # a row without keys has weights 0, not exp(−inf + inf)
            return None if value is None else torch.exp(scores - shift[..., None]) @ value, lse

        chunk = max(1, _PAIRS // (inputs.key.shape[0] * inputs.key.shape[1]))
        pieces = [checkpoint(rows, query, use_reentrant=False) for query in inputs.query.split(chunk, dim=1)]
        lse = torch.cat([piece[1] for piece in pieces], dim=1)
        if inputs.value is None:
            return Attended(None, lse)
        return Attended(torch.cat([piece[0] for piece in pieces], dim=1).to(inputs.value.dtype), lse)
