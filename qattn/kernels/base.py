r"""Kernels, known only by how they attend.

A kernel K ≥ 0 between N sites is symmetric, and everything else in the library asks it for one thing:

    lse_i = log Σ_j K_ij e^{b_j},        out_i = Σ_j K_ij e^{b_j} v_j / e^{lse_i}.

Sums and positive multiples of kernels follow from that alone.
"""

from abc import ABC, abstractmethod
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn.attended import Attended, merge
from qattn.ranks import ALONE, Ranks

__all__ = ["GaussianPoints", "Kernel", "PointKernel", "ScaledKernel", "SumKernel"]


class Kernel(ABC):
    """A symmetric kernel between sites, or between new sites and old ones."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(*batch, N, M), with M = N unless the kernel was evaluated at other points."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it is made of, and differentiated by."""

    @abstractmethod
    def replace(self, *tensors: Tensor) -> "Kernel":
        """The same kernel made of equal `tensors`: on another device, in another dtype, or aliases for a gradient."""

    @abstractmethod
    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        """out (*batch, N, C) and lse (*batch, N) for bias (*batch, M) and value (*batch, M, C)."""

    @abstractmethod
    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        """lse (*batch, n) of the rows numbered (n,) from all pairs: on the CPU, in float64, without gradients."""

    def error(self, bias: Tensor | None = None, *, rows: int = 256, seed: int = 0) -> Tensor:
        r"""The largest relative error of the row sums :math:`\sum_j K_{ij} e^{b_j}`, measured on random rows.

        Args:
            bias: Shape (*batch, M), as in `attend`; 0 by default. Rows of points that it leaves out are not drawn.
            rows: How many rows are compared with exact ones.
            seed: Which rows.

        Returns:
            A tensor of shape (*batch,).
        """
        *batch, N, M = self.shape
        bias = torch.zeros(M, dtype=self.dtype, device=self.device) if bias is None else bias
        bias = bias.detach().expand(*batch, M)
        is_drawn = torch.ones(*batch, N, dtype=torch.bool)
        if N == M:
            is_drawn = (bias > -torch.inf).cpu()
        candidates = is_drawn.reshape(self.shape[:-2].numel(), N).any(0).nonzero()[:, 0]
        sample = candidates[torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:rows]]
        with torch.no_grad():
            found = self.attend(bias).lse.cpu().double()[..., sample]
        exact = self.exact_lse(sample, bias)
        is_right = (found == exact) | ~is_drawn[..., sample]  # −inf in both, or drawn for another item of the batch
        gaps = torch.where(is_right, 0, torch.expm1(found - exact).abs())
        return self.ranks.largest(gaps.to(self.device, self.dtype))

    def smallest_eigenvalue(self, *, tol: float = 1e-2) -> float:
        """The smallest eigenvalue of K, to about `tol` of the largest; NaN if it was not found.

        If it is far below 0 then K is not positive semidefinite, and the spectrum of Q may go below 0 too.
        """
        if len(self.shape) != 2 or self.shape[0] != self.shape[1]:
            raise ValueError(
                f"`smallest_eigenvalue` takes one square matrix; this kernel has shape {tuple(self.shape)}."
            )
        _checks.held_alone("smallest_eigenvalue", self.ranks)
        from qattn._scipy import DiffusionOperator, extreme_eigenvalues  # here, because SciPy is slow to import

        zero = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)

        def apply(columns: Tensor) -> Tensor:
            out, lse = self.attend(zero, columns)
            assert out is not None
            return torch.exp(lse)[:, None] * out

        return extreme_eigenvalues(DiffusionOperator(apply, apply, zero, zero + 1), tol, scale=0.0)[0]

    @property
    def mass(self) -> Tensor | None:
        """The masses that its sites come with, (*batch, N), of sum 1; None if they are equal."""
        return None

    @property
    def ranks(self) -> Ranks:
        """Who holds its sites: this process alone, or a group in which each holds the shard that `shape` tells of."""
        return ALONE

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its logarithms."""
        return torch.promote_types(self.tensors[0].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def __add__(self, other: Any) -> "Kernel":
        return SumKernel(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, factor: Any) -> "Kernel":
        return NotImplemented if isinstance(factor, Kernel) else ScaledKernel(self, factor)

    __rmul__ = __mul__


class PointKernel(Kernel):
    """A kernel that is a function of points, and so can be evaluated between new ones and its own."""

    @abstractmethod
    def at(self, points: Any) -> "PointKernel":
        """The kernel between other points (*batch, N', d) and its own."""


class GaussianPoints(PointKernel):
    """A Gaussian kernel of points, which has gradients in space; its points are here, or a shard of them."""

    _points: Tensor
    _targets: Tensor  # the same object for a cloud and itself
    _sigma: Tensor

    @property
    def points(self) -> Tensor:
        """The positions x, shape (*batch, N, d), of a sharded cloud those of this rank."""
        return self._points

    @property
    def sigma(self) -> Tensor:
        """The bandwidth σ, a tensor without axes or of shape (H,)."""
        return self._sigma

    @property
    def shape(self) -> torch.Size:
        batch = broadcast_shapes(self._targets.shape[:-2], self._points.shape[:-2])
        return torch.Size((*batch, *self._sigma.shape, self._targets.shape[-2], self._points.shape[-2]))

    @property
    def _is_self(self) -> bool:
        return self._targets is self._points

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._points, self._sigma) if self._is_self else (self._points, self._sigma, self._targets)

    @property
    @abstractmethod
    def centred(self) -> Tensor:
        """The positions about the mean of all points, shape (*batch, N, d), where differences cancel less."""

    @abstractmethod
    def prepared_as(self, other: Any) -> "GaussianPoints":
        """The same kernel, with what another one has prepared for the same points: their order."""

    @abstractmethod
    def moved(self, points: Tensor, sigma: float) -> "GaussianPoints":
        """A kernel of the same kind, of other points (N, d) with another bandwidth, by any method."""

    @abstractmethod
    def for_channels(self, channels: int) -> "GaussianPoints":
        """The same kernel by the method that is cheapest to apply to so many channels, again and again."""


class SumKernel(PointKernel):
    """K + L + …, by merging."""

    def __init__(self, *kernels: Kernel) -> None:
        _checks.kernels_of_one_size([kernel.shape for kernel in kernels])
        _checks.all_or_none_sharded([kernel.ranks.is_alone for kernel in kernels])
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

    @property
    def mass(self) -> Tensor | None:
        """The masses of those that have any, which should agree."""
        masses = [mass for kernel in self._kernels if (mass := kernel.mass) is not None]
        if not all(_are_alike(masses[0].detach(), other.detach()) for other in masses[1:]):
            raise ValueError(
                "The kernels of a sum come with masses that differ, as weights of mixtures do. Give `mass`, those that "
                "the sum should have."
            )
        return masses[0] if masses else None

    @property
    def ranks(self) -> Ranks:
        return self._kernels[0].ranks

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        # Values of 16 bits are averaged in the precision of the logarithms, and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        whole = reduce(merge, (kernel.attend(bias, values) for kernel in self._kernels))
        return whole if value is None or whole.out is None else Attended(whole.out.to(value.dtype), whole.lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return reduce(torch.logaddexp, (kernel.exact_lse(rows, bias) for kernel in self._kernels))

    def at(self, points: Any) -> "SumKernel":
        return SumKernel(*(_checks.point_kernel(kernel, PointKernel).at(points) for kernel in self._kernels))


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether masses that broadcast are equal but for rounding."""
    return bool(torch.isclose(a, b.to(a), rtol=16 * torch.finfo(a.dtype).eps, atol=0).all())


class ScaledKernel(PointKernel):
    """c K for a number c > 0, or a tensor of them that broadcasts with the batch of K: log c is added to the lse."""

    def __init__(self, kernel: Kernel, factor: float | Tensor) -> None:
        _checks.positive("the factor of a kernel", factor)
        self._kernel = kernel
        self._factor = torch.as_tensor(factor, dtype=kernel.dtype, device=kernel.device)
        _checks.factor_of_kernel(self._factor, kernel.shape[:-2])

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
        return ScaledKernel(self._kernel.replace(*tensors[:-1]), tensors[-1])

    @property
    def mass(self) -> Tensor | None:
        return self._kernel.mass

    @property
    def ranks(self) -> Ranks:
        return self._kernel.ranks

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        out, lse = self._kernel.attend(bias, value)
        if out is not None:  # a factor may have axes of its own
            out = out.expand(*broadcast_shapes(out.shape[:-2], self._factor.shape), *out.shape[-2:])
        return Attended(out, lse + torch.log(self._factor)[..., None])

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return self._kernel.exact_lse(rows, bias) + torch.log(self._factor.detach().cpu().double())[..., None]

    def at(self, points: Any) -> "ScaledKernel":
        return ScaledKernel(_checks.point_kernel(self._kernel, PointKernel).at(points), self._factor)
