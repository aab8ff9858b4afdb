"""What a backend is given: checked tensors with one batch axis, and what was asked for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qattn.attention.score import Score, gaussian
from qattn.lift import Extent, extent

__all__ = ["Inputs"]


@dataclass(frozen=True)
class Inputs:
    """The arguments of `attend`, broadcast and flattened to one batch axis.

    Attributes:
        query: Shape (B, N, D).
        key: Shape (B, M, D).
        value: Shape (B, M, C), or None for lse alone. Its dtype may differ from the query's.
        bias: Shape (B, M), added to the scores of each key; −inf leaves the key out.
        score: The score of one query and one key.
        tol: The largest error of lse that is acceptable.
        batch: The shape the batch axis had.
        sigma: Bandwidths (B,), for scores s((q − k) / σ) of differences; None for s(q, k) itself.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    bias: Tensor | None
    score: Score
    tol: float
    batch: torch.Size
    sigma: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        """What scores are computed in: float32, or float64 if anything is."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        return dtype if self.value is None else torch.promote_types(dtype, self.value.dtype)

    @property
    def needs_gradients(self) -> bool:
        tensors = self.query, self.key, self.value, self.bias, self.sigma
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def is_gaussian(self) -> bool:
        return self.score is gaussian

    @property
    def channels(self) -> int:
        return 0 if self.value is None else self.value.shape[-1]

    @cached_property
    def origin(self) -> Tensor:
        """The mean of the keys by their weights e^b, (B, 1, D), without gradient: near the points that matter."""
        key = self.key.detach().to(self.dtype)
        if self.bias is None:
            return key.double().mean(1, keepdim=True).to(key)
        bias = self.bias.detach().double()
        share = torch.where((bias == -torch.inf).all(-1, keepdim=True), 0, bias).softmax(-1)  # (B, M)
        return (share[..., None] * key).sum(1, keepdim=True).to(key)

    @cached_property
    def embedded(self) -> tuple[Tensor, Tensor]:
        """Queries and keys about the origin, in units of the bandwidth; keys that are absent lie at the origin."""
        query, key = (x.detach().to(self.dtype) - self.origin for x in (self.query, self.key))
        if self.bias is not None:
            key = torch.where((self.bias == -torch.inf)[..., None], 0, key)
        scale = 1.0 if self.sigma is None else self.sigma.detach().to(self.dtype)[:, None, None]
        return query / scale, key / scale

    @cached_property
    def extent(self) -> Extent:
        """How large the coordinates and biases are: what decides the rounding of a lift."""
        return extent(*self.embedded, self.bias)

    def describe(self) -> str:
        """One aligned line a tensor, for messages."""
        rows = []
        for name in ("query", "key", "value", "bias"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                shape = tuple(self.batch) + tuple(tensor.shape[1:])
                rows.append((name, str(shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if not self.is_gaussian:
            lines.append(f"    score  {getattr(self.score, '__name__', self.score)}")
        return "\n".join(lines)
