"""A kernel given as a matrix of similarities."""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.kernels.base import Kernel
from qattn.kernels.edges import Edges

__all__ = ["MatrixKernel"]


class MatrixKernel(Kernel):
    """A given K ≥ 0, symmetric; positive definiteness is not assumed.

    Args:
        similarity: Shape (*batch, N, N), a tensor or an array; or a sparse matrix (N, N) of torch or SciPy, whose
            products then cost its entries and no more.

    Example:
        >>> MatrixKernel([[2.0, 1.0], [1.0, 2.0]]).shape
        torch.Size([2, 2])
    """

    def __init__(self, similarity: Any) -> None:
        self._edges: Edges | None = None
        if _checks.is_sparse(similarity):
            index, entries, size = _checks.edges("similarity", similarity)
            self._edges = Edges(index[:, entries > 0], torch.log(entries[entries > 0]), size)
            return
        entries = _checks.similarity(similarity)
        is_positive = entries > 0
        self._log = torch.where(is_positive, torch.log(torch.where(is_positive, entries, 1)), -torch.inf)

    def __repr__(self) -> str:
        return f"MatrixKernel({tuple(self.shape)})"

    @property
    def shape(self) -> torch.Size:
        return self._log.shape if self._edges is None else torch.Size((self._edges.size, self._edges.size))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._log if self._edges is None else self._edges.log,)

    def replace(self, *tensors: Tensor) -> "MatrixKernel":
        kernel = object.__new__(MatrixKernel)
        kernel._edges = None
        if self._edges is None:
            (kernel._log,) = tensors
        else:
            kernel._edges = self._edges.replace(*tensors)
        return kernel

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        if self._edges is not None:
            return self._edges.attend(bias, value)
        scores = self._log + bias[..., None, :]  # (*batch, N, N)
        largest = scores.amax(-1, keepdim=True).detach()
        largest = torch.where(largest == -torch.inf, 0, largest)  # a row without any weight
        weights = torch.exp(scores - largest)
        total = weights.sum(-1)
        lse = largest[..., 0] + torch.log(total)
        if value is None:
            return Attended(None, lse)
        weights = weights / torch.where(total == 0, 1, total)[..., None]
        with torch.autocast(self.device.type, enabled=False):
            return Attended(weights.to(value.dtype) @ value, lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        log, bias = (x.detach().cpu().double() for x in (*self.tensors, bias))
        if self._edges is not None:
            return self._edges.replace(log).attend(bias, None).lse[..., rows]
        return torch.logsumexp(log[..., rows, :] + bias[..., None, :], dim=-1)
