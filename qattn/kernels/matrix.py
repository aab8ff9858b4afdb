"""A kernel given as a matrix of similarities: by its entries, by those that are not 0, or by its products."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.kernels.base import Kernel
from qattn.kernels.edges import Edges
from qattn.kernels.products import Products

__all__ = ["MatrixKernel"]


class MatrixKernel(Kernel):
    """A given K ≥ 0, symmetric; positive semidefiniteness is not assumed (see `smallest_eigenvalue`).

    Args:
        similarity: Shape (*batch, N, N), a tensor or an array; or a sparse matrix (N, N) of torch or SciPy, whose
            products then cost its entries and no more; or products alone: a SciPy `LinearOperator`, or a function that
            takes tensors (N, C) to K times them. Of the last two symmetry and sign are tried on random signals.
            Results are differentiable by all entries of a dense matrix, also by those that are 0; pairs that a sparse
            matrix does not hold stay absent, and have no gradient.
        size: The number N of rows, for a function.

    Example:
        >>> MatrixKernel([[2.0, 1.0], [1.0, 2.0]]).shape
        torch.Size([2, 2])
        >>> MatrixKernel(lambda x: x + x.mean(0), size=100).shape
        torch.Size([100, 100])
    """

    def __init__(self, similarity: Any, *, size: int | None = None) -> None:
        self._entries: _Dense | Edges | Products
        if _checks.is_sparse(similarity):
            self._entries = Edges.of(*_checks.edges("similarity", similarity))
        elif callable(similarity) or hasattr(similarity, "matmat"):
            self._entries = Products(*_checks.products(similarity, size))
        else:
            self._entries = _Dense(_checks.similarity(similarity))

    def __repr__(self) -> str:
        return f"MatrixKernel({tuple(self.shape)})"

    @property
    def shape(self) -> torch.Size:
        return self._entries.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._entries.tensor,)

    def replace(self, *tensors: Tensor) -> "MatrixKernel":
        kernel = object.__new__(MatrixKernel)
        kernel._entries = self._entries.replace(*tensors)
        return kernel

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        return self._entries.attend(bias, value)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        tensor, bias = (x.detach().cpu().double() for x in (self._entries.tensor, bias))
        if isinstance(self._entries, _Dense):
            return torch.logsumexp(torch.log(tensor[..., rows, :]) + bias[..., None, :], dim=-1)
        return self._entries.replace(tensor).attend(bias, None).lse[..., rows]


class _Dense:
    """All entries K, (*batch, N, N)."""

    def __init__(self, entries: Tensor) -> None:
        self.tensor = entries

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def replace(self, entries: Tensor) -> "_Dense":
        dense = _Dense(entries)
        if "_log" in vars(self) and (entries.device, entries.dtype) == (self.tensor.device, self.tensor.dtype):
            dense._log = self._log
        return dense

    @cached_property
    def _log(self) -> Tensor:
        """log K without gradient, in float32 at least; −inf where K is 0."""
        entries = self.tensor.detach()
        return torch.log(entries.to(torch.promote_types(entries.dtype, torch.float32)))

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        scores = self._log + bias[..., None, :]  # (*batch, N, N)
        largest = scores.detach().amax(-1, keepdim=True)
        largest = torch.where(largest == -torch.inf, 0, largest)  # a row without any weight
        weights = torch.exp(scores - largest) + self._change(bias[..., None, :] - largest)
        total = weights.sum(-1)
        is_empty = total == 0
        divisor = torch.where(is_empty, 1, total)
        lse = torch.where(is_empty, -torch.inf, largest[..., 0] + torch.log(divisor))
        if value is None:
            return Attended(None, lse)
        with torch.autocast(self.tensor.device.type, enabled=False):
            weights = weights / divisor[..., None]
            dtype = torch.promote_types(weights.dtype, value.dtype)
            return Attended((weights.to(dtype) @ value.to(dtype)).to(value.dtype), lse)

    def _change(self, exponents: Tensor) -> Tensor | float:
        """(K − K₀) e^x with K₀ = K: 0, whose derivative by K is e^x whether or not K is 0, where log K has none."""
        if not (torch.is_grad_enabled() and self.tensor.requires_grad):
            return 0.0
        # Where K is 0 nothing bounds x. Beyond what a float holds, 0 · ∞ would be NaN.
        most = math.log(torch.finfo(exponents.dtype).max) - 1
        return (self.tensor - self.tensor.detach()) * torch.exp(exponents.clamp(max=most))
