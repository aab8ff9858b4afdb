"""The kernel of a similarity matrix, which is dense, sparse, or given by its products."""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from qattn import _checks
from qattn._autocast import product
from qattn._broadcasting import Index
from qattn._types import ArrayLike
from qattn.attended import Attended
from qattn.kernels.base import Kernel
from qattn.kernels.implicit_matrix import LinearOperatorLike, Products, checked_products, is_operator
from qattn.kernels.sparse_matrix import Edges, ScipySparse, checked_edges, is_sparse

__all__ = ["MatrixKernel"]


class MatrixKernel(Kernel):
    """A symmetric similarity matrix K ≥ 0; it need not be positive semidefinite (see `smallest_eigenvalue`).

    Results are differentiable with respect to all entries of a dense matrix, also those that are 0. Pairs that a sparse
    matrix does not store remain absent, and have no gradient.

    Args:
        similarity: A tensor or array of shape (*batch, N, N); a sparse matrix (N, N) of torch or SciPy, whose cost is
            proportional to its entries; a SciPy `LinearOperator` (N, N); or a function from tensors x (N, C) to K x.
            The symmetry and the sign of the last two are checked on random signals.
        num_rows: Number N of rows, required for a function.

    Examples:
        >>> MatrixKernel([[2.0, 1.0], [1.0, 2.0]]).shape
        torch.Size([2, 2])
        >>> MatrixKernel(lambda x: x + x.mean(0), num_rows=100).shape
        torch.Size([100, 100])
    """

    def __init__(
        self,
        similarity: ArrayLike | ScipySparse | LinearOperatorLike | Callable[[Tensor], Tensor],
        *,
        num_rows: int | None = None,
    ) -> None:
        self._entries: _Dense | Edges | Products
        if is_sparse(similarity):
            self._entries = Edges.of(*checked_edges("similarity", similarity))
        elif is_operator(similarity):
            self._entries = Products(*checked_products(similarity, num_rows))
        else:
            self._entries = _Dense(_checked_similarity(similarity))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"MatrixKernel({tuple(self.shape)})"

    @property
    def shape(self) -> torch.Size:
        return self._entries.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._entries.tensor,)

    def replace(self, *tensors: Tensor) -> "MatrixKernel":
        return self._with(_entries=self._entries.replace(*tensors))

    def indexed(self, index: Index) -> "MatrixKernel":
        return self._with(_entries=_Dense(self._entries.tensor[index])) if index else self  # others have no batch

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        return self._entries.attend(bias, value)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        tensor, bias = (x.detach().cpu().double() for x in (self._entries.tensor, bias))
        if isinstance(self._entries, _Dense):
            return torch.logsumexp(torch.log(tensor[..., rows, :]) + bias[..., None, :], dim=-1)
        return self._entries.replace(tensor).attend(bias, None).lse[..., rows]


class _Dense:
    """A matrix given by all its entries, (*batch, N, N)."""

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
        largest = torch.where(largest == -torch.inf, 0, largest)  # rows without weight
        weights = torch.exp(scores - largest) + self._change(bias[..., None, :] - largest)
        total = weights.sum(-1)
        is_empty = total == 0
        divisor = torch.where(is_empty, 1, total)
        lse = torch.where(is_empty, -torch.inf, largest[..., 0] + torch.log(divisor))
        if value is None:
            return Attended(None, lse)
        weights = weights / divisor[..., None]
        dtype = torch.promote_types(weights.dtype, value.dtype)
        return Attended(product(weights.to(dtype), value.to(dtype)).to(value.dtype), lse)

    def _change(self, exponents: Tensor) -> Tensor | float:
        """Return (K − K₀) e^x with K₀ = K detached: 0, but with derivative e^x by K, also where log K has none."""
        if not (torch.is_grad_enabled() and self.tensor.requires_grad):
            return 0.0
        # Where K = 0, x is unbounded, and 0 · ∞ would be NaN.
        largest = math.log(torch.finfo(exponents.dtype).max) - 1
        return (self.tensor - self.tensor.detach()) * torch.exp(exponents.clamp(max=largest))


def _checked_similarity(numbers: ArrayLike) -> Tensor:
    """Convert to a tensor (*batch, N, N), symmetric and ≥ 0."""
    tensor = _checks.floating("similarity", numbers)
    if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] == 0:
        raise ValueError(f"`similarity` should have shape (*batch, N, N); got {_checks.shape_of(tensor)}.")
    _checks.finite("similarity", tensor, "Set them to 0 to leave those pairs out.")
    if (tensor < 0).any():
        raise ValueError(
            f"`similarity` should not be negative; {int((tensor < 0).sum())} of its {tensor.numel()} entries are. "
            "Use `similarity.clamp(min=0)`, or `exp` of a signed score."
        )
    gap = (tensor - tensor.mT).abs().amax()
    if gap > 1e-5 * tensor.abs().amax():
        raise ValueError(
            f"`similarity` should be symmetric; entries differ from their mirror image by up to {float(gap):.3g}. "
            "Use `(similarity + similarity.mT) / 2`."
        )
    return tensor
