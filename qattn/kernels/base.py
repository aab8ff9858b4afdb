r"""The interface of kernels, and their sums and positive multiples.

A kernel K ≥ 0 between N sites is symmetric, and all algorithms access it through one operation, `attend`:

    lse_i = log Σ_j K_ij e^{b_j},        out_i = Σ_j K_ij e^{b_j} v_j / e^{lse_i}.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index, broadcast_shapes, own_index
from qattn._eager import eager
from qattn._html import table
from qattn._types import ArrayLike, TensorOrArray
from qattn.attended import Attended, merge
from qattn.ranks import ALONE, Ranks

__all__ = ["Kernel", "PointKernel", "ScaledKernel", "SumKernel", "at_points", "fits_memory"]

_MAX_DENSE = 2**30  # bytes of a dense matrix
K = TypeVar("K", bound="Kernel")


class Kernel(ABC):
    """A symmetric kernel between sites, or between new sites and old ones.

    A new kernel implements `shape`, `tensors`, `replace`, `attend` and `exact_lse`, and `indexed` if it has batch axes.
    """

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape (*batch, N, M), with M = N unless the kernel is evaluated at other points."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that define the kernel, with respect to which it is differentiable."""

    @abstractmethod
    def replace(self, *tensors: Tensor) -> "Kernel":
        """Return the same kernel of `tensors` of equal values: on another device, of another dtype, or aliases."""

    @abstractmethod
    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        """Attend from all sites to all sites. Arguments are not checked.

        Args:
            bias: Shape (*batch, M); −inf leaves a site out.
            value: Shape (*batch, M, C), 0 at sites that are left out; None for lse alone.
            all_rows: Whether rows of sites that are left out must be right.

        Returns:
            out (*batch, N, C) and lse (*batch, N).
        """

    @abstractmethod
    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Compute lse (*batch, n) of the rows (n,) from all pairs: on the CPU, in float64, without gradients."""

    def indexed(self, index: Index) -> "Kernel":
        """Return the kernel of some items of the batch, K[index], for one integer ≥ 0 or slice per batch axis."""
        if index:
            raise ValueError(
                f"Items of {self!r} cannot be taken, as it does not implement `indexed`. Make a kernel of each item."
            )
        return self

    @property
    def mass(self) -> Tensor | None:
        """Default masses of the sites, (*batch, N), with sum 1; None for equal masses."""
        return None

    @property
    def ranks(self) -> Ranks:
        """Process group over which the sites are sharded; `ALONE` if they are local."""
        return ALONE

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `lse`."""
        return torch.promote_types(self.tensors[0].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def to(self, *args: Any, **kwargs: Any) -> "Kernel":
        """Return the kernel on another device or in another dtype; see `Tensor.to` for the arguments."""
        return self.replace(*(tensor.to(*args, **kwargs) for tensor in self.tensors))

    @eager
    def __matmul__(self, signal: ArrayLike) -> TensorOrArray:
        """Apply K to a signal (M,), (M, C) or (*batch, M, C).

        Returns:
            A tensor, an array or a DTensor of shape (*batch, N) or (*batch, N, C), as `signal` is.
        """
        values = _checks.signal(signal, self.shape, self.device, self.ranks)
        columns = values[:, None] if values.ndim == 1 else values
        out, lse = self.attend(torch.zeros(self.shape[-1], dtype=self.dtype, device=self.device), columns)
        assert out is not None
        product = (torch.exp(lse)[..., None] * out).to(values.dtype)
        return self.ranks.like(product[..., 0] if values.ndim == 1 else product, signal)

    def to_dense(self) -> Tensor:
        """Compute the matrix K, shape (*batch, N, M), if it fits a gigabyte."""
        fits_memory("to_dense", self)
        return self @ torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)

    def error(self, bias: Tensor | None = None, *, num_rows: int = 256, seed: int = 0) -> Tensor:
        """Measure the largest relative error of the row sums Σ_j K_ij e^{b_j} on random rows.

        Args:
            bias: Shape (*batch, M), as in `attend`; 0 by default. Rows of sites that it leaves out are not sampled.
            num_rows: Number of rows compared with exact ones.
            seed: Seed of the random rows.

        Returns:
            A tensor of shape (*batch,).
        """
        *batch, N, M = self.shape
        bias = torch.zeros(M, dtype=self.dtype, device=self.device) if bias is None else bias
        bias = bias.detach().expand(*batch, M)
        is_present = torch.ones(*batch, N, dtype=torch.bool)
        if N == M:
            is_present = (bias > -torch.inf).cpu()
        candidates = is_present.reshape(self.shape[:-2].numel(), N).any(0).nonzero()[:, 0]
        sample = candidates[torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_rows]]
        with torch.no_grad():
            lse = self.attend(bias).lse.cpu().double()[..., sample]
        exact = self.exact_lse(sample, bias)
        is_ignored = (lse == exact) | ~is_present[..., sample]  # −inf in both, or sampled for another item of the batch
        gaps = torch.where(is_ignored, 0, torch.expm1(lse - exact).abs())
        return self.ranks.largest(gaps.to(self.device, self.dtype))

    def smallest_eigenvalue(self, *, tol: float = 1e-2) -> float:
        """Estimate the smallest eigenvalue of K, to about `tol` times the largest; NaN if the iteration fails.

        If it is far below 0, K is not positive semidefinite, and Q may have negative eigenvalues too.
        """
        if len(self.shape) != 2 or self.shape[0] != self.shape[1]:
            raise ValueError(
                f"`smallest_eigenvalue` takes one square matrix; this kernel has shape {tuple(self.shape)}."
            )
        self.ranks.check_alone("smallest_eigenvalue")
        from qattn._scipy import DiffusionOperator, extreme_eigenvalues  # here, because SciPy is slow to import

        zero = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        operator = DiffusionOperator(self.__matmul__, self.__matmul__, zero, zero + 1)
        return extreme_eigenvalues(operator, tol, scale=0.0)[0]

    def __add__(self, other: "Kernel") -> "Kernel":
        return SumKernel(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, factor: float | Tensor) -> "Kernel":
        return NotImplemented if isinstance(factor, Kernel) else ScaledKernel(self, factor)

    __rmul__ = __mul__

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        shape = " × ".join(f"{size:,}" for size in self.shape)
        rows = [("is", repr(self)), ("matrix", f"{shape}, never formed"), ("lse", f"{self.dtype}, {self.device}")]
        return table(type(self).__name__, [*rows, *self._remarks()])

    def _remarks(self) -> list[tuple[str, str]]:
        """Return further rows for notebooks, as pairs of a name and a text, without a pass over pairs."""
        return []

    def _with(self: K, **changed: Any) -> K:
        """Return a copy with other attributes."""
        kernel = object.__new__(type(self))
        kernel.__dict__.update(self.__dict__ | changed)
        return kernel


class PointKernel(Kernel):
    """A kernel that is a function of points, so that it can be evaluated between new points and its own."""

    @abstractmethod
    def at(self, points: ArrayLike) -> "PointKernel":
        """Return the kernel between other points (*batch, N', d) and its own."""


def at_points(kernel: Kernel, points: ArrayLike) -> PointKernel:
    """Evaluate a kernel at other points, or raise if it is not a function of points."""
    if not isinstance(kernel, PointKernel):
        raise ValueError(f"{kernel!r} is not a function of points, so it cannot be evaluated at other points.")
    return kernel.at(points)


def fits_memory(name: str, kernel: Kernel) -> None:
    """Check that a dense matrix of the kernel's shape fits a gigabyte."""
    kernel.ranks.check_alone(name)
    size = kernel.shape.numel() * kernel.dtype.itemsize
    if size > _MAX_DENSE:
        raise ValueError(
            f"`{name}` would make a matrix of shape {tuple(kernel.shape)}, {size / 2**30:.1f} GB. "
            "Apply the operator instead, as in `q @ signal`, or use `q.to_scipy()`."
        )


class SumKernel(PointKernel):
    """K + L + …, computed by `merge`."""

    def __init__(self, *kernels: Kernel) -> None:
        _check_sizes([kernel.shape for kernel in kernels])
        if len({kernel.ranks.is_alone for kernel in kernels}) > 1:
            raise ValueError(
                "The kernels of a sum should all be sharded, or none of them. Give each of them the same `group`."
            )
        self._kernels = kernels

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._kernels))

    @property
    def shape(self) -> torch.Size:
        return broadcast_shapes(*(kernel.shape for kernel in self._kernels))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for kernel in self._kernels for tensor in kernel.tensors)

    def replace(self, *tensors: Tensor) -> "SumKernel":
        kernels, rest = [], list(tensors)
        for kernel in self._kernels:
            count = len(kernel.tensors)
            kernels.append(kernel.replace(*rest[:count]))
            rest = rest[count:]
        return SumKernel(*kernels)

    def indexed(self, index: Index) -> "SumKernel":
        return SumKernel(*(kernel.indexed(own_index(index, kernel.shape[:-2])) for kernel in self._kernels))

    @property
    def mass(self) -> Tensor | None:
        """Masses of the kernels that have any, which should be equal."""
        masses = [mass for kernel in self._kernels if (mass := kernel.mass) is not None]
        if not all(_are_close(masses[0].detach(), other.detach()) for other in masses[1:]):
            raise ValueError(
                "The kernels of a sum have different default masses, such as weights of mixtures. Pass `mass`, the "
                "masses of the sum."
            )
        return masses[0] if masses else None

    @property
    def ranks(self) -> Ranks:
        return self._kernels[0].ranks

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        # Values of 16 bits are averaged in the dtype of lse, and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        out, lse = reduce(merge, (kernel.attend(bias, values, all_rows=all_rows) for kernel in self._kernels))
        return Attended(None if value is None or out is None else out.to(value.dtype), lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return reduce(torch.logaddexp, (kernel.exact_lse(rows, bias) for kernel in self._kernels))

    def at(self, points: ArrayLike) -> "SumKernel":
        return SumKernel(*(at_points(kernel, points) for kernel in self._kernels))


def _check_sizes(shapes: Sequence[torch.Size]) -> None:
    try:
        fits = len({shape[-2:] for shape in shapes}) == 1 and broadcast_shapes(*shapes) is not None
    except RuntimeError:
        fits = False
    if not fits:
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"The kernels of a sum should have one size and batches that broadcast; got {got}.")


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether masses that broadcast are equal up to rounding."""
    return bool(torch.isclose(a, b.to(a), rtol=16 * torch.finfo(a.dtype).eps, atol=0).all())


class ScaledKernel(PointKernel):
    """c K for a number c > 0, or a tensor of them that broadcasts with the batch of K; log c is added to lse."""

    def __init__(self, kernel: Kernel, factor: float | Tensor) -> None:
        _checks.positive("the factor of a kernel", factor)
        self._kernel = kernel
        self._factor = torch.as_tensor(factor, dtype=kernel.dtype, device=kernel.device)
        try:
            broadcast_shapes(self._factor.shape, kernel.shape[:-2])
        except RuntimeError:
            raise ValueError(
                "The factor of a kernel should be a number, or broadcast with its batch axes "
                f"{tuple(kernel.shape[:-2])}; got shape {tuple(self._factor.shape)}."
            ) from None

    def __repr__(self) -> str:
        factor = f"{float(self._factor):g}" if self._factor.ndim == 0 else f"({self._factor.numel()} factors)"
        return f"{factor} * {self._kernel!r}"

    @property
    def shape(self) -> torch.Size:
        batch = broadcast_shapes(self._kernel.shape[:-2], self._factor.shape)
        return torch.Size((*batch, *self._kernel.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self._kernel.tensors, self._factor)

    def replace(self, *tensors: Tensor) -> "ScaledKernel":
        return self._with(_kernel=self._kernel.replace(*tensors[:-1]), _factor=tensors[-1])

    def indexed(self, index: Index) -> "ScaledKernel":
        kernel = self._kernel.indexed(own_index(index, self._kernel.shape[:-2]))
        return self._with(_kernel=kernel, _factor=self._factor[own_index(index, self._factor.shape)])

    @property
    def mass(self) -> Tensor | None:
        return self._kernel.mass

    @property
    def ranks(self) -> Ranks:
        return self._kernel.ranks

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        out, lse = self._kernel.attend(bias, value, all_rows=all_rows)
        if out is not None:  # the factor may have batch axes that the kernel lacks
            out = out.expand(*broadcast_shapes(out.shape[:-2], self._factor.shape), *out.shape[-2:])
        return Attended(out, lse + torch.log(self._factor)[..., None])

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return self._kernel.exact_lse(rows, bias) + torch.log(self._factor.detach().cpu().double())[..., None]

    def at(self, points: ArrayLike) -> "ScaledKernel":
        return ScaledKernel(at_points(self._kernel, points), self._factor)
