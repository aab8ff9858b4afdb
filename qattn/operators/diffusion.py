r"""The diffusion operator of a kernel: Q = diag(e^l) K diag(m e^r).

| normalization | left l | right r | properties |
|---|---|---|---|
| "sinkhorn" | f | f | preserves constants and mass; self-adjoint for m; spectrum in [0, 1] |
| "row" | −lse(log m) | 0 | preserves constants |
| "symmetric" | −½ lse(log m) | −½ lse(log m) | self-adjoint for m |
| "none" | 0 | 0 | self-adjoint for m |

One call of `attend` applies it: Q v = exp(l + lse) · out with the bias r + log m, for any potentials, converged or not.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index, broadcast_shapes, own_index
from qattn._eager import eager
from qattn._html import table
from qattn._progress import Progress
from qattn._types import ArrayLike, MassLike, TensorOrArray, like_input
from qattn.kernels import GaussianKernel, Kernel, OrientedKernel, PointKernel
from qattn.kernels.base import at_points, fits_memory
from qattn.kernels.of_points import KernelOptions, as_kernel
from qattn.mass import mass_of
from qattn.operators import scaling
from qattn.operators.scaling import has_massless, log_of_mass, shares
from qattn.operators.sinkhorn import SinkhornResult, Solver, checked_potential, solve_potential
from qattn.ranks import kind_of_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which comes with torch

__all__ = ["Diffusion", "Normalization", "diffuse", "diffusion"]

Normalization = Literal["sinkhorn", "row", "symmetric", "none"]
_Entry: TypeAlias = int | slice | EllipsisType  # of an index
_KERNEL_TOL = 1e-3  # largest error of a kernel that is made for an operator
_CANCELLED = 1e-4  # fraction of a gradient in space that may be lost to rounding


class _Spectrum(Protocol):
    """A `qattn.Spectrum`."""

    def power(self, t: float, signal: ArrayLike) -> TensorOrArray:
        """Apply Q^t on the span of its modes."""


class _Operator(ABC):
    """A linear operator on signals: `operator @ signal`, or `torch.matmul(operator, signal)`."""

    __array_ufunc__ = None  # NumPy then passes `array @ operator` to `__rmatmul__`

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """Kernel between rows and columns."""

    @abstractmethod
    def apply(self, signal: Tensor) -> Tensor:
        """Apply to a tensor (*batch, M, C), without checks."""

    @abstractmethod
    def apply_transpose(self, signal: Tensor) -> Tensor:
        """Apply the transpose to a tensor (*batch, N, C), without checks."""

    @property
    def shape(self) -> torch.Size:
        """Shape (*batch, N, M)."""
        return self.kernel.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.kernel.dtype

    @property
    def device(self) -> torch.device:
        return self.kernel.device

    @eager
    def __matmul__(self, signal: ArrayLike) -> TensorOrArray:
        """Apply to a signal (M,), (M, C) or (*batch, M, C).

        Returns:
            A tensor, an array or a DTensor of shape (*batch, N) or (*batch, N, C), as `signal` is.
        """
        return self._multiplied(self.apply, signal, self.shape)

    @eager
    def __rmatmul__(self, signal: ArrayLike) -> TensorOrArray:
        """Apply the transpose to rows (N,) or (*batch, C, N): signal @ Q = (Qᵀ signalᵀ)ᵀ."""
        rows = _checks.as_tensor("signal", signal)
        columns = rows if rows.ndim == 1 else rows.mT
        product = self._multiplied(self.apply_transpose, columns, self.shape[:-2] + self.shape[:-3:-1])
        return like_input(product if rows.ndim == 1 else product.mT, signal)

    def _multiplied(self, multiply: Callable[[Tensor], Tensor], signal: ArrayLike, shape: torch.Size) -> TensorOrArray:
        if isinstance(signal, _Operator):
            raise TypeError(
                "Operators can be applied to signals, not to one another. Apply them one after the other, as in "
                "`q @ (q @ signal)` or `q.power(2, signal)`."
            )
        values = _checks.signal(signal, shape, self.device, self.kernel.ranks)
        result = multiply(values[:, None])[..., 0] if values.ndim == 1 else multiply(values)
        return self.kernel.ranks.like(result, signal)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and not kwargs:
            left, right = args
            return left.__matmul__(right) if isinstance(left, _Operator) else right.__rmatmul__(left)
        return NotImplemented

    def to_dense(self) -> TensorOrArray:
        """Compute the matrix, shape (*batch, N, M), if it fits a gigabyte."""
        fits_memory("to_dense", self.kernel)
        return self.apply(torch.eye(self.shape[-1], dtype=self.dtype, device=self.device))


@dataclass(frozen=True, repr=False, eq=False)
class Diffusion(_Operator):
    r"""Q = diag(e^l) K diag(m e^r), made by `qattn.diffusion`.

    If it was made of an array, its properties such as `mass` and `potential` are arrays, else tensors.

    Attributes:
        normalization: "sinkhorn", "row", "symmetric" or "none".
    """

    _kernel: Kernel
    _mass: Tensor
    _left: Tensor
    _right: Tensor
    normalization: Normalization
    _result: SinkhornResult
    _is_numpy: bool
    _keeps_constants: bool
    _has_massless: bool

    def __repr__(self) -> str:
        error = float(self._result.marginal_error.amax())
        return f"Diffusion({self.kernel!r}, normalization={self.normalization!r}, marginal_error={error:.1e})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks; nothing is computed for it."""
        result, shape = self._result, " × ".join(f"{size:,}" for size in self.shape)
        missed = "" if result.converged.all() else ", above the tolerance"
        rows = [
            ("matrix", f"{shape}, never formed"),
            ("kernel", repr(self.kernel)),
            ("normalization", f"{self.normalization}, passes: {int(result.num_iter.amax())}"),
            ("mean |Q1 − 1|", f"{float(result.marginal_error.amax()):.1e}{missed}"),
        ]
        return table("Diffusion", rows)

    @property
    def kernel(self) -> Kernel:
        """Kernel K."""
        return self._kernel

    @property
    def bias(self) -> Tensor:
        """Bias r + log m of the kernel, of a shape that broadcasts to (*batch, N); −inf at points without mass."""
        return self._right + log_of_mass(self._mass)

    @property
    def weight(self) -> Tensor:
        """Weight w = m e^{r−l} for which Q is self-adjoint, of a shape that broadcasts to (*batch, N)."""
        return torch.exp(self.bias - self._left)

    def apply(self, signal: Tensor) -> Tensor:
        options = {"keeps_constants": self._keeps_constants, "all_rows": self._has_massless}
        return scaling.apply(self.kernel, self._left, self.bias, signal, **options)

    def apply_transpose(self, signal: Tensor) -> Tensor:
        return scaling.apply_transpose(self.kernel, self._left, self.bias, signal)

    def _given(self, tensor: Tensor) -> TensorOrArray:
        return tensor.numpy(force=True) if self._is_numpy else tensor

    @property
    def mass(self) -> TensorOrArray:
        """Masses m, shape (*batch, N) or one that broadcasts to it."""
        return self._given(self._mass)

    @property
    def potential(self) -> TensorOrArray:
        """Potential l of the rows, shape (*batch, N); f for "sinkhorn"."""
        return self._given(self._left)

    @property
    def marginal_error(self) -> TensorOrArray:
        """Mass-weighted mean of |Q1 − 1|, shape (*batch,)."""
        return self._given(self._result.marginal_error)

    @property
    def num_iter(self) -> TensorOrArray:
        """Number of kernel passes of the normalization, shape (*batch,); 0 for "none", 1 for "row" and "symmetric"."""
        return self._given(self._result.num_iter)

    @property
    def converged(self) -> TensorOrArray:
        """True where the tolerance was met, shape (*batch,), and for normalizations that do not iterate."""
        return self._given(self._result.converged)

    def kernel_error(self, num_rows: int = 256, seed: int = 0) -> TensorOrArray:
        """Measure the largest error of Q1 that the method of the kernel causes, on random rows; shape (*batch,)."""
        return self._given(self.kernel.error(self.bias, num_rows=num_rows, seed=seed))

    @eager
    def __getitem__(self, index: _Entry | tuple[_Entry, ...]) -> "Diffusion":
        """Take heads or items of the batch: q[index] is Q[index], without a new solve.

        Args:
            index: Integers and slices for the axes *batch of Q, (*batch, N, N), the last of which is that of heads, if
                there are any; `...` stands for the axes not given. Rows and columns cannot be indexed.

        Returns:
            An operator whose kernel may use another method than Q, within its tolerance.

        Examples:
            >>> q = diffusion(torch.randn(4, 100, 3), sigma=[0.2, 0.5])
            >>> q[0].shape, q[..., 0].shape, q[1:3, -1].shape
            (torch.Size([2, 100, 100]), torch.Size([4, 100, 100]), torch.Size([2, 100, 100]))
        """
        self.kernel.ranks.agree("q[index]", self.device, {"`index`": index})
        own = _checked_index(index, self.shape)
        return replace(
            self,
            _kernel=self.kernel.indexed(own),
            _mass=self._mass[own_index(own, self._mass.shape[:-1])],
            _left=self._left[own],
            _right=self._right[own],
            _result=self._result.indexed(own),
        )

    @property
    def T(self) -> "_Transpose":  # noqa: N802 (as NumPy calls it)
        """The transpose Qᵀ = diag(m e^r) K diag(e^l); for "sinkhorn", Qᵀg = m Q(g / m)."""
        return _Transpose(self)

    @eager
    def power(self, t: float, signal: ArrayLike, *, spectrum: _Spectrum | None = None) -> TensorOrArray:
        """Apply Q^t to a signal.

        Args:
            t: Exponent ≥ 0: an integer, or any real number with a `spectrum`.
            signal: Signal (N,), (N, C) or (*batch, N, C).
            spectrum: `qattn.Spectrum` of Q, which applies the fractional part of t.

        Returns:
            A tensor, an array or a DTensor, as `signal` is.
        """
        self.kernel.ranks.agree("power", self.device, {"`t`": t})
        _checks.not_negative("t", t)
        times = int(t)
        if times != t:
            if spectrum is None:
                raise ValueError(
                    f"`t` should be an integer; got {t}. For other exponents pass a spectrum: "
                    "`q.power(t, signal, spectrum=qattn.eigsh(q, k))`."
                )
            signal = spectrum.power(t - times, signal)
        if times == 0:
            return signal
        values = _checks.signal(signal, self.shape, self.device, self.kernel.ranks)
        values = values[:, None] if np.ndim(signal) == 1 else values
        with Progress("Diffusion", times) as progress:
            for _ in range(times):
                values = self.apply(values)
                progress.advance()
        return self.kernel.ranks.like(values[..., 0] if np.ndim(signal) == 1 else values, signal)

    @eager
    def value_and_gradient(self, signal: ArrayLike) -> tuple[TensorOrArray, TensorOrArray]:
        r"""Compute Qf and its exact gradient in space in one pass.

        For a Gaussian kernel and rows that sum to one, Qf extends to a smooth function of space, and

            ∇(Qf) = (Q(f ⊗ x) − Qf ⊗ Qx) / σ²,

        the covariance of signal and position within each row.

        Args:
            signal: Signal (N,), (N, C) or (*batch, N, C). For a DTensor, results are local to this rank.

        Returns:
            Qf of shape (*batch, N, C) and its gradient of shape (*batch, N, C, d); without the axis C for (N,).
        """
        if not isinstance(self.kernel, GaussianKernel) or self.normalization not in ("sinkhorn", "row"):
            raise ValueError(
                '`value_and_gradient` needs a `GaussianKernel` and `normalization="sinkhorn"` or "row"; '
                f'got {type(self.kernel).__name__} and "{self.normalization}".'
            )
        values = _checks.signal(signal, self.shape, self.device, self.kernel.ranks)
        value, gradient = self._value_and_gradient(values[:, None] if values.ndim == 1 else values)
        if values.ndim == 1:
            value, gradient = value[..., 0], gradient[..., 0, :]
        return like_input(value, signal), like_input(gradient, signal)

    def _value_and_gradient(self, f: Tensor) -> tuple[Tensor, Tensor]:
        kernel, ranks, bias = self.kernel, self.kernel.ranks, self.bias
        assert isinstance(kernel, GaussianKernel)
        f, dtype = f.expand(*broadcast_shapes(f.shape[:-2], self.shape[:-2]), *f.shape[-2:]), f.dtype
        has_mass = (bias > -torch.inf)[..., None]
        x, sigma = kernel.points.to(kernel.dtype), kernel.sigma
        if sigma.ndim:
            x, sigma = x[..., None, :, :], sigma[:, None, None]
        # Relative to the means of positions and signal: covariances are small differences of their products.
        x = x - ranks.mean(bias.detach(), x.detach())
        extent = torch.where(has_mass, x.detach() / sigma.detach(), 0).norm(dim=-1)
        if torch.finfo(x.dtype).eps * float(ranks.largest(extent).amax()) ** 2 > _CANCELLED:
            x = x.double()
        f = torch.where(has_mass, f, 0).to(x.dtype)
        constant = ranks.mean(bias.detach(), f.detach())
        f = f - constant
        x = torch.where(has_mass, x, 0).expand(*f.shape[:-1], -1)
        moments = (f[..., None] * x[..., None, :]).flatten(-2)  # (*batch, N, C d)
        mean, lse = kernel.attend(bias, torch.cat([f, moments, x], dim=-1), all_rows=self._has_massless)
        assert mean is not None
        C, d = f.shape[-1], x.shape[-1]
        mean_f, mean_fx, mean_x = mean.split([C, C * d, d], dim=-1)
        covariance = mean_fx.unflatten(-1, (C, d)) - mean_f[..., None] * mean_x[..., None, :]
        factor = torch.exp(torch.where(has_mass[..., 0], self._left + lse, 0))[..., None]
        value = (factor * mean_f + factor.detach() * constant).to(dtype)
        return value, (covariance / sigma[..., None] ** 2).to(dtype)

    def extend(self, points: ArrayLike) -> "_Extension":
        """Evaluate the diffusion at other points (*batch, N', d): an operator of shape (*batch, N', N).

        The potential extends to a continuous function, f(y) = −lse(y), which the attention that applies the operator
        computes anyway.
        """
        return _Extension(self, at_points(self.kernel, points))

    def to_dense(self) -> TensorOrArray:
        return self._given(super().to_dense())

    def to_scipy(self, symmetric: bool = False) -> Any:
        """Return a SciPy `LinearOperator`: Q or, if `symmetric`, √w Q /√w with w = m e^{r−l} and the same spectrum."""
        _checks.one_item("to_scipy", self.shape, "q[0].to_scipy()")
        self.kernel.ranks.check_alone("to_scipy")
        from qattn._scipy import DiffusionOperator  # here, because SciPy is slow to import

        weight = self.weight.expand(self.shape[-1]) if symmetric else None
        return DiffusionOperator(self.apply, self.apply_transpose, self._left, weight)

    def to(self, *args: Any, **kwargs: Any) -> "Diffusion":
        """Return the operator on another device or in another dtype; see `Tensor.to` for the arguments."""
        mass, left, right = (tensor.to(*args, **kwargs) for tensor in (self._mass, self._left, self._right))
        kernel = self.kernel.to(*args, **kwargs)
        result = self._result.to(kernel.device)
        return replace(self, _kernel=kernel, _mass=mass, _left=left, _right=right, _result=result)

    @torch.no_grad()
    def refined(self, tol: float, max_iter: int) -> "Diffusion":
        """Continue the normalization to a mean |Q1 − 1| of about `tol`, if it preserves constants; never warns.

        It uses the current method of the kernel, which may differ from that of the first normalization.
        """
        if self.normalization == "row":
            bias = self.bias.expand(self.shape[:-2] + self.shape[-1:])
            return replace(self, _left=-self.kernel.attend(bias).lse)
        if self.normalization != "sinkhorn":
            return self
        # Each pass divides the error by about five, except the first, which measures it.
        error = max(float(self._result.marginal_error.amax()), tol)
        num_passes = min(max_iter, 2 + math.ceil(math.log(error / tol) / math.log(5)))
        arguments = self.kernel, self._mass, self._has_massless, 0.0, Solver(num_passes), self._left, None
        result, _ = solve_potential(*arguments)
        if not (result.marginal_error <= self._result.marginal_error).all():  # the kernel is indefinite
            return self
        return replace(self, _left=result.potential, _right=result.potential, _result=result)

    def for_channels(self, num_channels: int) -> "Diffusion":
        """Return the same operator with the methods that are cheapest to apply repeatedly to many channels."""
        if not isinstance(self.kernel, GaussianKernel | OrientedKernel):
            return self
        return replace(self, _kernel=self.kernel.for_channels(num_channels))


class _Transpose(_Operator):
    """The transpose Qᵀ of a diffusion operator."""

    def __init__(self, q: Diffusion) -> None:
        self.T = q

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    @property
    def kernel(self) -> Kernel:
        return self.T.kernel

    def apply(self, signal: Tensor) -> Tensor:
        return self.T.apply_transpose(signal)

    def apply_transpose(self, signal: Tensor) -> Tensor:
        return self.T.apply(signal)


class _Extension(_Operator):
    """The rows of Q at other points."""

    def __init__(self, q: Diffusion, kernel: PointKernel) -> None:
        self._q, self._kernel = q, kernel

    def __repr__(self) -> str:
        return f"{self._q!r}.extend({self.shape[-2]} points)"

    @property
    def kernel(self) -> Kernel:
        return self._kernel

    def __matmul__(self, signal: ArrayLike) -> TensorOrArray:  # local for a DTensor too: its rows are other points
        return super().__matmul__(self.kernel.ranks.local_part("signal", signal, -2))

    def apply(self, signal: Tensor) -> Tensor:
        bias = self._q.bias
        signal = torch.where((bias == -torch.inf)[..., None], 0, signal)  # it may be NaN at absent points
        out, lse = self.kernel.attend(bias, signal)
        assert out is not None
        if self._q.normalization in ("sinkhorn", "row"):  # the potential at a new point is −lse
            return out
        if self._q.normalization == "symmetric":
            log_mass = log_of_mass(self._q._mass).expand(self.shape[:-2] + self.shape[-1:])
            lse = lse - 0.5 * self.kernel.attend(log_mass).lse
        return (torch.exp(lse)[..., None] * out).to(out.dtype)

    def apply_transpose(self, signal: Tensor) -> Tensor:
        raise ValueError(
            "An operator that is extended to other points has no transpose. Use `q.T` of the operator itself."
        )


@eager
def diffusion(
    points_or_kernel: ArrayLike | Kernel,
    sigma: ArrayLike | None = None,
    mass: MassLike | None = None,
    *,
    normalization: Normalization = "sinkhorn",
    tol: float = 1e-3,
    solver: Solver = Solver(),  # noqa: B008 (it is frozen)
    init: ArrayLike | None = None,
    **kernel: "Unpack[KernelOptions]",
) -> Diffusion:
    r"""Make the diffusion operator of points with a Gaussian kernel, or of any kernel.

    Args:
        points_or_kernel: Points of shape (*batch, N, d), or a `Kernel`.
        sigma: Bandwidth of the Gaussian kernel: a number, or (H,) for one head per bandwidth. Only with points.
        mass: Masses of shape (*batch, N), 0 for padding; by default those of the kernel, or 1/N each. "density" takes
            those of `qattn.mass.density(kernel)`, for points that are random or uneven.
        normalization: "sinkhorn" preserves constants and mass; "row", "symmetric" and "none" are for comparison.
        tol: Mass-weighted mean of |Q1 − 1| at which the normalization stops; with 0, all passes of the solver are made.
            The error of row sums of a Gaussian kernel of points may be ten times that, and at most 1e-3.
        solver: Options of the Sinkhorn iteration and of its derivative.
        init: Potential to start from, for example that of a similar cloud.
        **kernel: Further arguments of `GaussianKernel`, except `tol`: `method`, `backend`, `group`. With `normals`
            (*batch, N, d), the kernel is an `OrientedKernel`, which does not join sheets that lie close together.

    Returns:
        Q of shape (*batch, N, N), or (*batch, H, N, N) for H bandwidths; never formed as a matrix.

    Examples:
        >>> q = diffusion(torch.randn(500, 3), sigma=0.5)
        >>> smooth = q @ torch.randn(500, 8)
        >>> bool(q.marginal_error < 1e-3)
        True
    """
    return _made(points_or_kernel, sigma, None, mass, normalization, tol, solver, init, kernel)[0]


@eager
def diffuse(
    points_or_kernel: ArrayLike | Kernel,
    sigma: ArrayLike | None,
    signal: ArrayLike,
    mass: MassLike | None = None,
    *,
    normalization: Normalization = "sinkhorn",
    tol: float = 1e-3,
    solver: Solver = Solver(),  # noqa: B008 (it is frozen)
    init: ArrayLike | None = None,
    **kernel: "Unpack[KernelOptions]",
) -> tuple[TensorOrArray, Diffusion]:
    """Make a diffusion operator and apply it in the last pass of the normalization, which saves a pass.

    Args:
        points_or_kernel: Points of shape (*batch, N, d), or a `Kernel`.
        sigma: Bandwidth of the Gaussian kernel of points; None with a kernel.
        signal: Signal (N,), (N, C) or (*batch, N, C).
        mass: Masses of shape (*batch, N); see `diffusion`.
        normalization: "sinkhorn", "row", "symmetric" or "none".
        tol: Mass-weighted mean of |Q1 − 1| at which the normalization stops; see `diffusion`.
        solver: Options of the Sinkhorn iteration and of its derivative.
        init: Potential to start from.
        **kernel: Further arguments of `GaussianKernel`, except `tol`; see `diffusion`.

    Returns:
        Q applied to the signal, a tensor, an array or a DTensor as `signal` is; and Q.

    Examples:
        >>> points = torch.randn(500, 3)
        >>> smooth, q = diffuse(points, 0.5, points)
        >>> smooth.shape
        torch.Size([500, 3])
    """
    q, out = _made(points_or_kernel, sigma, signal, mass, normalization, tol, solver, init, kernel)
    assert out is not None
    return q.kernel.ranks.like(out[..., 0] if np.ndim(signal) == 1 else out, signal), q


def _made(
    points_or_kernel: ArrayLike | Kernel,
    sigma: ArrayLike | None,
    signal: ArrayLike | None,
    mass: MassLike | None,
    normalization: Normalization,
    tol: float,
    solver: Solver,
    init: ArrayLike | None,
    options: KernelOptions,
) -> tuple[Diffusion, Tensor | None]:
    """Check the arguments of `diffusion`, make the operator, and apply it to a signal, if any."""
    _checks.not_negative("tol", tol)
    tols = {} if isinstance(points_or_kernel, Kernel) else {"tol": min(10 * tol, _KERNEL_TOL) or _KERNEL_TOL}
    k = as_kernel(points_or_kernel, sigma, **options, **tols)
    shared = {"`tol`": tol, "`solver`": solver, "`normalization`": normalization}
    shared |= {"The shape of `mass`": kind_of_rows(mass, -1), "Whether there is `init`": init is not None}
    k.ranks.agree("diffusion", k.device, shared | {"Whether there is a `signal`": signal is not None})
    _checks.one_of("normalization", normalization, ("sinkhorn", "row", "symmetric", "none"))
    m = mass_of(mass, k)
    some_massless = has_massless(m, k.ranks)
    start = None if init is None else checked_potential(init, k)
    value = None if signal is None else _checks.signal(signal, k.shape, k.device, k.ranks)
    value = value[:, None] if value is not None and value.ndim == 1 else value
    is_numpy = not isinstance(points_or_kernel, (Kernel, Tensor))
    if normalization == "sinkhorn":
        result, out = solve_potential(k, m, some_massless, tol, solver, start, value)
        left = right = result.potential
        # With a detached potential, the derivative of the row sums is not 0.
        keeps_constants = solver.adjoint != "detach"
    else:
        left, right, result, out = _in_one_step(k, m, normalization, value)
        keeps_constants = normalization == "row"
    return Diffusion(k, m, left, right, normalization, result, is_numpy, keeps_constants, some_massless), out


def _in_one_step(
    kernel: Kernel, mass: Tensor, normalization: Normalization, value: Tensor | None
) -> tuple[Tensor, Tensor, SinkhornResult, Tensor | None]:
    """Compute the potentials l and r of "row", "symmetric" or "none", the error |Q1 − 1|, and Q applied to values.

    The pass that applies Q also measures the error. Without values that is a pass of its own, except for "row", which
    divides rows by their sums.
    """
    zero = torch.zeros(kernel.shape[:-1], dtype=kernel.dtype, device=kernel.device)
    left = right = zero
    if normalization != "none":
        lse = kernel.attend(zero + log_of_mass(mass)).lse
        left = torch.where(lse > -torch.inf, -lse, 0)  # no mass reaches other rows, such as padding in a graph
        left, right = (left, zero) if normalization == "row" else (0.5 * left, 0.5 * left)
    bias, out, sums = right + log_of_mass(mass), None, torch.ones_like(left)
    if value is not None:
        out, sums = scaling.apply_and_sum(kernel, left, bias, value, normalization == "row", all_rows=True)
    elif normalization != "row":
        with torch.no_grad():
            sums = torch.exp(left + kernel.attend(bias).lse)
    error = kernel.ranks.total(shares(mass, kernel.ranks).detach() * (sums.detach() - 1).abs())
    count = torch.full(kernel.shape[:-2], int(normalization != "none"), device=kernel.device)
    return left, right, SinkhornResult(left, error, count, torch.ones_like(count, dtype=torch.bool)), out


def _checked_index(index: _Entry | tuple[_Entry, ...], shape: torch.Size) -> Index:
    """Convert an index of the batch axes of a shape (*batch, N, N) to one integer ≥ 0 or slice per axis."""
    *batch, _, _ = shape
    entries = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, entry in enumerate(entries) if entry is ...]
    missing = len(batch) + len(places) - len(entries)
    if not batch:
        raise ValueError(
            f"`q[index]` takes heads or items of a batch; this operator has shape {tuple(shape)}, and has neither. "
            "Take rows and columns of `q.to_dense()`."
        )
    if missing < 0 or len(places) > 1:
        raise ValueError(
            f"`index` should have at most {len(batch)} integers or slices, for the axes {tuple(batch)} of heads and "
            f"batch items, and one `...`; got {index}. Take rows and columns of `q.to_dense()`."
        )
    place = places[0] if places else len(entries)
    entries[place : place + 1] = [slice(None)] * missing
    return tuple(_checked_entry(entry, size) for entry, size in zip(entries, batch, strict=True))


def _checked_entry(entry: _Entry, size: int) -> int | slice:
    """Check the index of one axis; integers are counted from its beginning."""
    if isinstance(entry, slice):
        start, stop, step = entry.indices(size)
        if step < 0 or start >= stop:
            raise ValueError(
                f"`index` should take at least one of {size} items, in their order; got {entry}. "
                "Take items one by one for another order."
            )
        return entry
    try:
        number = None if isinstance(entry, bool | EllipsisType) else operator.index(entry)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(
            f"`index` should be integers, slices and `...`; got {type(entry).__name__}. "
            "Take items one by one, as in `[q[i] for i in (0, 2)]`."
        )
    if not -size <= number < size:
        raise IndexError(f"`index` should be from {-size} to {size - 1}; got {number}.")
    return number % size
