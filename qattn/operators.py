r"""The diffusion operator of a kernel: Q = diag(e^l) K diag(m e^r).

| normalization | left l | right r | what it keeps |
|---|---|---|---|
| "sinkhorn" | f | f | constants and mass; self-adjoint for m; spectrum in [0, 1] |
| "row" | −lse(log m) | 0 | constants |
| "symmetric" | −½ lse(log m) | −½ lse(log m) | self-adjoint for m |
| "none" | 0 | 0 | self-adjoint for m |

Applying it is one attend: Q v = exp(l + lse) · out with the bias r + log m, exact at any potential, converged or not.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._eager import eager
from qattn._progress import Progress
from qattn.kernels import GaussianKernel, Kernel, PointKernel
from qattn.kernels.base import GaussianPoints
from qattn.ranks import Ranks
from qattn.solver import (
    SinkhornResult,
    apply,
    apply_and_sum,
    apply_transpose,
    check_options,
    log_of_mass,
    shares,
    sinkhorn,
)

__all__ = ["NORMALIZATIONS", "Diffusion", "diffusion"]

NORMALIZATIONS = ("sinkhorn", "row", "symmetric", "none")
_KERNEL_TOL = 1e-3  # the largest error of a kernel that is made for an operator
_CANCELLED = 1e-4  # of a gradient in space, that rounding may take away
_MOST_DENSE = 2**30  # bytes of a dense matrix that someone might mean


class _Operator(ABC):
    """What can be applied to signals: `operator @ signal`."""

    _shape: torch.Size
    _device: torch.device
    _ranks: Ranks

    @abstractmethod
    def _apply(self, signal: Tensor) -> Tensor:
        """The operator applied to a signal (*batch, M, C)."""

    @property
    def shape(self) -> torch.Size:
        """(*batch, N, M)."""
        return self._shape

    @eager
    def __matmul__(self, signal: Any) -> Any:
        """Applies it to a signal (M,), (M, C) or (*batch, M, C); arrays come back as arrays, DTensors as DTensors."""
        values = _checks.signal(signal, self._shape, self._device, self._ranks)
        result = self._apply(values[:, None])[..., 0] if values.ndim == 1 else self._apply(values)
        return _as_given(result, signal)


def _as_given(result: Tensor, signal: Any) -> Any:
    """What the signal is: a tensor, an array, or a DTensor that lies on the same ranks."""
    if hasattr(signal, "to_local"):
        from qattn.distributed.shards import as_dtensor  # here, because few ever need it

        return as_dtensor(result, signal)
    return result if isinstance(signal, Tensor) else result.numpy(force=True)


class Diffusion(_Operator):
    r"""Q = diag(e^l) K diag(m e^r), made by `qattn.diffusion`.

    Attributes:
        kernel: The kernel K.
        normalization: "sinkhorn", "row", "symmetric" or "none".
        applied: Q applied to the signal that was given at construction, or None.
    """

    def __init__(
        self,
        kernel: Kernel,
        mass: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        normalization: str,
        result: SinkhornResult,
        is_numpy: bool,
        keeps_constants: bool,
    ) -> None:
        self.kernel, self.normalization, self._keeps_constants = kernel, normalization, keeps_constants
        self.applied: Any = None
        self._mass, self._left, self._right, self._result, self._is_numpy = mass, left, right, result, is_numpy
        self._shape, self._device, self._ranks = kernel.shape, kernel.device, kernel.ranks

    def __repr__(self) -> str:
        error = float(self._error.amax())
        return f"Diffusion({self.kernel!r}, normalization={self.normalization!r}, marginal_error={error:.1e})"

    def _apply(self, signal: Tensor) -> Tensor:
        right = self._right + log_of_mass(self._mass)
        return apply(self.kernel, self._left, right, signal, keeps_constants=self._keeps_constants)

    def _given(self, tensor: Tensor) -> Any:
        return tensor.numpy(force=True) if self._is_numpy else tensor

    @property
    def mass(self) -> Any:
        """The masses m, shape (*batch, N) or one that broadcasts to it."""
        return self._given(self._mass)

    @property
    def potential(self) -> Any:
        """The potential l of the rows, shape (*batch, N); f for "sinkhorn"."""
        return self._given(self._left)

    @property
    def _error(self) -> Tensor:
        return self._result.marginal_error

    @property
    def marginal_error(self) -> Any:
        """The mass-weighted mean of |Q1 − 1|, shape (*batch,)."""
        return self._given(self._error)

    def error(self, rows: int = 256, seed: int = 0) -> Any:
        """The largest error of Q1 by a method that is not exact, measured on random rows; shape (*batch,)."""
        return self._given(self.kernel.error(self._right + log_of_mass(self._mass), rows=rows, seed=seed))

    @property
    def num_iter(self) -> Any:
        """Kernel passes that normalising took, shape (*batch,); 0 for "none" and 1 for the one-step normalisations."""
        return self._given(self._result.num_iter)

    @property
    def converged(self) -> Any:
        """Whether the tolerance was met, shape (*batch,); true of normalisations that do not iterate."""
        return self._given(self._result.converged)

    @property
    def T(self) -> "_Transpose":  # noqa: N802 (as NumPy calls it)
        """The transpose Qᵀ = diag(m e^r) K diag(e^l); for "sinkhorn", Qᵀg = m Q(g / m)."""
        return _Transpose(self)

    def power(self, t: float, signal: Any, *, spectrum: Any = None) -> Any:
        """Q^t applied to a signal, for an integer t ≥ 0; any real t ≥ 0 within the modes of a `qattn.Spectrum`."""
        self._ranks.agree("power", self._device, {"`t`": t})
        whole = _checks.whole_part(t, spectrum)
        if whole != t:
            signal = spectrum.power(t - whole, signal)
        is_column = whole > 0 and len(self._shape) > 2 and np.ndim(signal) == 1
        with Progress("Diffusion", whole) as progress:
            for count in range(whole):
                signal = self @ signal
                if is_column and count == 0:  # a product (*batch, N) would be taken for channels
                    signal = signal[..., None]
                progress.advance()
        return signal[..., 0] if is_column else signal

    @eager
    def value_and_gradient(self, signal: Any) -> tuple[Any, Any]:
        r"""Qf, shape (*batch, N, C), and its gradient in space, exact and from one pass, shape (*batch, N, C, d).

        A signal (N,) gives (*batch, N) and (*batch, N, d); arrays come back as arrays.

        For a Gaussian kernel and rows that sum to one, Qf extends to a smooth function of space, and

            ∇(Qf) = (Q(f ⊗ x) − Qf ⊗ Qx) / σ²,

        the covariance of signal and position within each row. Of a DTensor, these are this rank's parts of both.
        """
        kernel = _checks.with_gradients(self.kernel, GaussianPoints, self.normalization)
        given = _checks.signal(signal, self._shape, self._device, self._ranks)
        f = given[:, None] if given.ndim == 1 else given
        f, dtype = f.expand(*broadcast_shapes(f.shape[:-2], self._shape[:-2]), *f.shape[-2:]), f.dtype
        bias = self._right + log_of_mass(self._mass)
        has_mass = (bias > -torch.inf)[..., None]
        x, sigma = kernel.points.to(kernel.dtype), kernel.sigma
        if sigma.ndim:
            x, sigma = x[..., None, :, :], sigma[:, None, None]
        # About means, by mass, of positions and signal: covariances are small differences of their products.
        x = x - self._ranks.mean(bias.detach(), x.detach())
        extent = torch.where(has_mass, x.detach() / sigma.detach(), 0).norm(dim=-1)
        if torch.finfo(x.dtype).eps * float(self._ranks.largest(extent).amax()) ** 2 > _CANCELLED:
            x = x.double()
        f = torch.where(has_mass, f, 0).to(x.dtype)
        constant = self._ranks.mean(bias.detach(), f.detach())
        f = f - constant
        x = x.expand(*f.shape[:-1], -1)
        moments = (f[..., None] * x[..., None, :]).flatten(-2)  # (*batch, N, C d)
        mean, lse = kernel.attend(bias, torch.cat([f, moments, x], dim=-1))
        assert mean is not None
        C, d = f.shape[-1], x.shape[-1]
        mean_f, mean_fx, mean_x = mean.split([C, C * d, d], dim=-1)
        covariance = mean_fx.unflatten(-1, (C, d)) - mean_f[..., None] * mean_x[..., None, :]
        factor = torch.where(has_mass, torch.exp(self._left + lse)[..., None], 1)
        value = (factor * mean_f + factor.detach() * constant).to(dtype)
        gradient = (covariance / sigma[..., None] ** 2).to(dtype)
        if given.ndim == 1:
            value, gradient = value[..., 0], gradient[..., 0, :]
        if isinstance(signal, Tensor):
            return value, gradient
        return value.numpy(force=True), gradient.numpy(force=True)

    def extend(self, points: Any) -> "_Extension":
        """The same diffusion evaluated at other points (*batch, N', d): an operator of shape (*batch, N', N).

        The potential is a continuous function, f(y) = −lse(y), so its value at a new point costs nothing beyond the
        attention that applies the operator there.
        """
        return _Extension(self, _checks.point_kernel(self.kernel, PointKernel).at(points))

    def to_dense(self) -> Any:
        """The matrix Q, shape (*batch, N, N), if it fits a gigabyte."""
        _checks.held_alone("to_dense", self.kernel.ranks)
        N = self._shape[-1]
        size = self._shape.numel() * self.kernel.dtype.itemsize
        if size > _MOST_DENSE:
            raise ValueError(
                f"`to_dense` would make a matrix of shape {tuple(self._shape)}, {size / 2**30:.1f} GB. "
                "Apply the operator instead, as in `q @ signal`, or take `q.to_scipy()`."
            )
        return self._given(self._apply(torch.eye(N, dtype=self.kernel.dtype, device=self._device)))

    def to_scipy(self, symmetric: bool = False) -> Any:
        """A SciPy `LinearOperator`: Q or, if `symmetric`, √w Q /√w with w = m e^{r−l}, which has the same spectrum."""
        if len(self._shape) > 2:
            raise ValueError(
                f"`to_scipy` takes one cloud with one bandwidth; this operator has shape {tuple(self._shape)}."
            )
        _checks.held_alone("to_scipy", self.kernel.ranks)
        from qattn._scipy import DiffusionOperator  # here, because SciPy is slow to import

        log_weight = log_of_mass(self._mass) + self._right - self._left
        weight = torch.exp(log_weight).expand(self._shape[-1]) if symmetric else None
        return DiffusionOperator(self._apply, self.T._apply, self._left, weight)

    def to(self, *args: Any, **kwargs: Any) -> "Diffusion":
        """The operator on another device or in another dtype, as `Tensor.to` has it; without what was `applied`."""
        mass, left, right = (tensor.to(*args, **kwargs) for tensor in (self._mass, self._left, self._right))
        kernel = self.kernel.replace(*(tensor.to(*args, **kwargs) for tensor in self.kernel.tensors))
        return self._with(kernel=kernel, mass=mass, left=left, right=right, result=self._result.to(kernel.device))

    def _with(self, **changed: Any) -> "Diffusion":
        """A copy with other parts, by the names of the arguments; without what was `applied`."""
        parts: dict[str, Any] = {
            "kernel": self.kernel,
            "mass": self._mass,
            "left": self._left,
            "right": self._right,
            "normalization": self.normalization,
            "result": self._result,
            "is_numpy": self._is_numpy,
            "keeps_constants": self._keeps_constants,
        }
        return Diffusion(**parts | changed)

    def for_channels(self, channels: int) -> "Diffusion":
        """The operator by whatever method applies it cheapest to many channels, again and again."""
        if not isinstance(self.kernel, GaussianPoints):
            return self
        return self._with(kernel=self.kernel.for_channels(channels))


class _Transpose(_Operator):
    """Qᵀ."""

    def __init__(self, q: Diffusion) -> None:
        self.T = q
        self._shape, self._device, self._ranks = q.shape, q.kernel.device, q.kernel.ranks

    def _apply(self, signal: Tensor) -> Tensor:
        q, log_mass = self.T, log_of_mass(self.T._mass)
        signal = signal.expand(*broadcast_shapes(signal.shape[:-2], self._shape[:-2]), *signal.shape[-2:])
        return apply_transpose(q.kernel, q._left, q._right + log_mass, signal)


class _Extension(_Operator):
    """The rows of Q at other points."""

    def __init__(self, q: Diffusion, kernel: PointKernel) -> None:
        self._q, self._kernel = q, kernel
        self._shape, self._device, self._ranks = kernel.shape, kernel.device, kernel.ranks

    def __matmul__(self, signal: Any) -> Any:  # a shard at points elsewhere, whatever the signal is a part of
        return super().__matmul__(_checks.own_part("signal", signal, -2, self._ranks))

    def _apply(self, signal: Tensor) -> Tensor:
        log_mass = log_of_mass(self._q._mass)
        out, lse = self._kernel.attend(self._q._right + log_mass, signal)
        assert out is not None
        if self._q.normalization in ("sinkhorn", "row"):  # the potential at a new point is −lse
            return out
        if self._q.normalization == "symmetric":
            lse = lse - 0.5 * self._kernel.attend(log_mass.expand(self._shape[:-2] + self._shape[-1:])).lse
        return (torch.exp(lse)[..., None] * out).to(out.dtype)


def _in_one_step(
    kernel: Kernel, mass: Tensor, left: Tensor, right: Tensor, normalization: str, value: Tensor | None
) -> SinkhornResult:
    """A normalization that does not iterate, with Q applied to values, if any, and the error |Q1 − 1| that it leaves.

    The pass that applies Q measures the error too; without values it takes one of its own, except for "row", whose rows
    have been divided by their own sums.
    """
    bias, out, sums = right + log_of_mass(mass), None, torch.ones_like(left)
    if value is not None:
        out, sums = apply_and_sum(kernel, left, bias, value, normalization == "row")
    elif normalization != "row":
        with torch.no_grad():
            sums = torch.exp(left + kernel.attend(bias).lse)
    error = kernel.ranks.total(shares(mass, kernel.ranks).detach() * (sums.detach() - 1).abs())
    count = torch.full(kernel.shape[:-2], int(normalization != "none"), device=kernel.device)
    return SinkhornResult(left, error, count, torch.ones_like(count, dtype=torch.bool), out=out)


@eager
def diffusion(
    points_or_kernel: Any,
    sigma: Any = None,
    mass: Any = None,
    *,
    normalization: str = "sinkhorn",
    tol: float = 1e-3,
    max_iter: int = 50,
    init: Any = None,
    adjoint: str = "implicit",
    iteration: str = "chebyshev",
    signal: Any = None,
    **kernel: Any,
) -> Diffusion:
    r"""The diffusion operator of points with a Gaussian kernel, or of any kernel.

    Args:
        points_or_kernel: Points of shape (*batch, N, d), a tensor or an array, or a `Kernel`.
        sigma: The bandwidth of the Gaussian kernel, a number or (H,) for one head each; only with points.
        mass: Masses of shape (*batch, N), 0 for padding; those of the kernel, or 1/N each, by default.
        normalization: "sinkhorn" keeps constants and mass; "row", "symmetric" and "none" for comparison.
        tol: The mass-weighted mean of |Q1 − 1| at which normalising stops; 0 takes all of `max_iter` passes. The method
            of the Gaussian kernel may err by ten times that in a row sum, and at most by 1e-3.
        max_iter: The most kernel passes of it.
        init: A potential to start from, as of a similar cloud.
        adjoint: How gradients go through the normalisation: "implicit", "unroll" or "detach".
        iteration: "chebyshev" or "plain"; see `sinkhorn`.
        signal: A signal to apply Q to with the last pass of normalising; the result is `q.applied`.
        **kernel: Further arguments of `GaussianKernel`.

    Example:
        >>> q = diffusion(torch.randn(500, 3), sigma=0.5)
        >>> smooth = q @ torch.randn(500, 8)
        >>> bool(q.marginal_error < 1e-3)
        True
    """
    is_numpy = not isinstance(points_or_kernel, (Kernel, Tensor))
    _checks.not_negative("tol", tol)
    gaussian = partial(GaussianKernel, tol=min(10 * tol, _KERNEL_TOL) or _KERNEL_TOL)
    k: Kernel = _checks.kernel_of(points_or_kernel, sigma, kernel, Kernel, gaussian)
    solving: dict[str, Any] = {"tol": tol, "max_iter": max_iter, "adjoint": adjoint, "iteration": iteration}
    asked = {f"`{name}`": value for name, value in solving.items()} | {"`normalization`": normalization}
    asked |= {"The shape of `mass`": _checks.kind_of_rows(mass, -1), "Whether there is `init`": init is not None}
    k.ranks.agree("diffusion", k.device, asked | {"Whether there is a `signal`": signal is not None})
    _checks.one_of("normalization", normalization, NORMALIZATIONS)
    check_options(**solving)
    mass = _checks.mass(k.mass if mass is None else mass, k)
    value = None if signal is None else _checks.signal(signal, k.shape, k.device, k.ranks)
    columns = value[:, None] if value is not None and value.ndim == 1 else value
    zero = torch.zeros(k.shape[:-1], dtype=k.dtype, device=k.device)
    if normalization == "sinkhorn":
        result = sinkhorn(k, mass, init=init, value=columns, **solving)
        left = right = result.potential
    else:
        left = right = zero
        if normalization != "none":
            lse = k.attend(zero + log_of_mass(mass)).lse
            left = torch.where(lse > -torch.inf, -lse, 0)  # no mass reaches the others, as padding in a graph
            left, right = (left, zero) if normalization == "row" else (0.5 * left, 0.5 * left)
        result = _in_one_step(k, mass, left, right, normalization, columns)
    # With a detached potential, rows sum to one and yet have a derivative.
    keeps_constants = normalization == "row" or (normalization == "sinkhorn" and adjoint != "detach")
    q = Diffusion(
        k,
        mass,
        left,
        right,
        normalization=normalization,
        result=result,
        is_numpy=is_numpy,
        keeps_constants=keeps_constants,
    )
    if value is not None and columns is not None:
        out = q._apply(columns) if result.out is None else result.out
        q.applied = _as_given(out[..., 0] if value.ndim == 1 else out, signal)
    return q
