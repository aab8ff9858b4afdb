"""Arguments of one attention: tensors with one batch axis, and the required accuracy."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qattn._types import dtype_name
from qattn.attention.score import Score, gaussian
from qattn.lift import Extent, extent
from qattn.tiles.tiling import Tiling

__all__ = ["BlockLists", "Inputs"]


class BlockLists(NamedTuple):
    """Blocks of keys that each block of queries attends to: blocks[b, i, : counts[b, i]]."""

    counts: Tensor  # (B, rows) int32
    blocks: Tensor  # (B, rows, width) int32
    size: int  # points per block


@dataclass(frozen=True)
class Inputs:
    """Arguments of an engine, broadcast and flattened to one batch axis.

    Attributes:
        query: Shape (B, N, D).
        key: Shape (B, M, D); the same object as `query` for clouds that attend to themselves.
        value: Shape (B, M, C), or None for lse alone. Its dtype may differ from the query's.
        bias: Shape (B, M), added to the scores of each key; −inf leaves the key out. None for 0.
        sigma: Bandwidths (B,), for scores s((q − k) / σ, 0); None for s(q, k).
        score: The score of one query and one key.
        tol: Largest acceptable error of lse.
        all_rows: Whether the rows of points that are left out as keys must be right, if clouds attend to themselves.
        blocks: Blocks of keys to attend to; None for all.
        batch: Shape that the batch axis had, which messages show.
        known_extent: Sizes of coordinates and biases, if they are known; None to measure them.
        bias_growth: Factor by which measured biases may still grow.
        known_tilings: Queries and keys in tiles, if they are known; None to lay them out.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None
    bias: Tensor | None = None
    sigma: Tensor | None = None
    score: Score = gaussian
    tol: float = 1e-3
    all_rows: bool = True
    blocks: BlockLists | None = None
    batch: torch.Size | None = None
    known_extent: Extent | None = None
    bias_growth: float = 1.0
    known_tilings: tuple[Tiling, Tiling] | None = None

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scores: float64 if the points or the values are, else float32."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        return dtype if self.value is None else torch.promote_types(dtype, self.value.dtype)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors with respect to which attention is differentiable: query, key, value, bias and sigma."""
        return self.query, self.key, self.value, self.bias, self.sigma

    @property
    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tensors)

    @property
    def is_gaussian(self) -> bool:
        return self.score is gaussian

    @property
    def channels(self) -> int:
        return 0 if self.value is None else self.value.shape[-1]

    @property
    def biases(self) -> Tensor:
        """Bias (B, M), 0 if there is none."""
        return self.key.new_zeros(self.key.shape[:2]) if self.bias is None else self.bias

    @cached_property
    def origin(self) -> Tensor:
        """Mean of the keys weighted by e^b, (B, 1, D), without gradient."""
        key = self.key.detach().to(self.dtype)
        if self.bias is None:
            return key.double().mean(1, keepdim=True).to(key)
        bias = self.bias.detach().double()
        share = torch.where((bias == -torch.inf).all(-1, keepdim=True), 0, bias).softmax(-1)  # (B, M)
        return (share[..., None] * key).sum(1, keepdim=True).to(key)

    @cached_property
    def embedded(self) -> tuple[Tensor, Tensor]:
        """Queries and keys relative to the origin, in units of the bandwidth; absent keys are moved to the origin."""
        query, key = (x.detach().to(self.dtype) - self.origin for x in (self.query, self.key))
        if self.bias is not None:
            key = torch.where((self.bias == -torch.inf)[..., None], 0, key)
        scale = 1.0 if self.sigma is None else self.sigma.detach().to(self.dtype)[:, None, None]
        return query / scale, key / scale

    @cached_property
    def extent(self) -> Extent:
        """Sizes of coordinates and biases, which determine the rounding of a lift. Measuring them waits for a GPU."""
        if self.known_extent is not None:
            return self.known_extent
        query, key, bias = extent(*self.embedded, self.bias)
        return Extent(query, key, self.bias_growth * bias)

    @property
    def measured_extent(self) -> Extent | None:
        """The extent, if it is known or something has asked for it."""
        return self.__dict__.get("extent", self.known_extent)

    @cached_property
    def tilings(self) -> tuple[Tiling, Tiling]:
        """Queries and keys in tiles, in their own order."""
        if self.known_tilings is not None:
            return self.known_tilings
        key = Tiling(self.key.to(self.dtype))
        return key if self.query is self.key else Tiling(self.query.to(self.dtype)), key

    def describe(self) -> str:
        """Write one aligned line per tensor, for messages."""
        batch = self.query.shape[:1] if self.batch is None else self.batch
        rows = [
            (name, str((*batch, *x.shape[1:])), dtype_name(x.dtype), str(x.device))
            for name, x in zip(("query", "key", "value", "bias", "sigma"), self.tensors, strict=True)
            if x is not None
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if not self.is_gaussian:
            lines.append(f"    score  {getattr(self.score, '__name__', self.score)}")
        return "\n".join(lines)
