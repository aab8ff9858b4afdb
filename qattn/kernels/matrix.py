"""A kernel given as a matrix of similarities: by its entries, by those that are not 0, or by its products."""

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
            index, entries, rows = _checks.edges("similarity", similarity)
            self._entries = Edges(index[:, entries > 0], torch.log(entries[entries > 0]), rows)
        elif callable(similarity) or hasattr(similarity, "matmat"):
            self._entries = Products(*_checks.products(similarity, size))
        else:
            entries = _checks.similarity(similarity)
            is_positive = entries > 0
            self._entries = _Dense(
                torch.where(is_positive, torch.log(torch.where(is_positive, entries, 1)), -torch.inf)
            )

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
            return torch.logsumexp(tensor[..., rows, :] + bias[..., None, :], dim=-1)
        return self._entries.replace(tensor).attend(bias, None).lse[..., rows]


class _Dense:
    """All entries, by their logarithms (*batch, N, N)."""

    def __init__(self, log: Tensor) -> None:
        self.tensor = log

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def replace(self, log: Tensor) -> "_Dense":
        return _Dense(log)

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        scores = self.tensor + bias[..., None, :]  # (*batch, N, N)
        largest = scores.amax(-1, keepdim=True).detach()
        largest = torch.where(largest == -torch.inf, 0, largest)  # a row without any weight
        weights = torch.exp(scores - largest)
        total = weights.sum(-1)
        lse = largest[..., 0] + torch.log(total)
        if value is None:
            return Attended(None, lse)
        weights = weights / torch.where(total == 0, 1, total)[..., None]
        with torch.autocast(self.tensor.device.type, enabled=False):
            return Attended(weights.to(value.dtype) @ value, lse)
