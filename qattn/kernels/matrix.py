"""A kernel given as a matrix of similarities."""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.kernels.base import Kernel

__all__ = ["MatrixKernel"]


class MatrixKernel(Kernel):
    """A given K ≥ 0, symmetric; positive definiteness is not assumed.

    Args:
        similarity: Shape (*batch, N, N), a tensor or an array.

    Example:
        >>> MatrixKernel([[2.0, 1.0], [1.0, 2.0]]).shape
        torch.Size([2, 2])
    """

    def __init__(self, similarity: Any) -> None:
        entries = _checks.similarity(similarity)
        is_positive = entries > 0
        self._log = torch.where(is_positive, torch.log(torch.where(is_positive, entries, 1)), -torch.inf)

    def __repr__(self) -> str:
        return f"MatrixKernel({tuple(self.shape)})"

    @property
    def shape(self) -> torch.Size:
        return self._log.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._log,)

    def replace(self, *tensors: Tensor) -> "MatrixKernel":
        kernel = object.__new__(MatrixKernel)
        (kernel._log,) = tensors
        return kernel

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
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
        log, bias = (x.detach().cpu().double() for x in (self._log, bias))
        return torch.logsumexp(log[..., rows, :] + bias[..., None, :], dim=-1)
