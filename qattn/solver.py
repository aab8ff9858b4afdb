r"""Symmetric Sinkhorn normalisation, and how to differentiate through it.

The potential f of a kernel K with masses m solves f + lse(f + log m) = 0, which says that Q = ΛKMΛ, Λ = diag(e^f), M =
diag(m), keeps constants. The error of the iteration f ← f − θ (f + lse) obeys e ← (I − θ (I + Q)) e, and the spectrum
of I + Q lies in [1, 2] for every positive definite kernel. So θ = ½, the paper's choice, halves the error in each
step, and Chebyshev's iteration on [1, 2] takes off a factor of 5.8; a first step of ½ from a cold start gets close
enough for linear theory.

The same iteration solves the linear systems of the implicit adjoint. For a cotangent g of f,

    (I + Q)ᵀ u = g,        and u is then the cotangent of −lse(f + log m) at fixed f.

All products are attends, so gradients need no kernel of their own, and the solves are differentiable again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn._warning import warn_caller
from qattn.attended import sized
from qattn.kernels.base import Kernel
from qattn.pullback import vector_jacobian
from qattn.ranks import Ranks

__all__ = [
    "ADJOINTS",
    "ITERATIONS",
    "SinkhornResult",
    "apply",
    "apply_and_sum",
    "apply_transpose",
    "log_of_mass",
    "shares",
    "sinkhorn",
]

ADJOINTS = ("implicit", "unroll", "detach")
ITERATIONS = ("chebyshev", "plain")


@dataclass(frozen=True)
class SinkhornResult:
    """What `sinkhorn` found.

    Attributes:
        potential: The potential f, shape (*batch, N).
        marginal_error: Mass-weighted mean of |Q1 − 1| at this potential, shape (*batch,).
        num_iter: Kernel passes taken, the measuring one included, shape (*batch,).
        converged: Whether the error is below `tol`, shape (*batch,).
        history: The errors of all passes, if asked for, each of shape (*batch,).
        out: Q applied to the values, if some were given, shape (*batch, N, C).
    """

    potential: Tensor
    marginal_error: Tensor
    num_iter: Tensor
    converged: Tensor
    history: tuple[Tensor, ...] | None = None
    out: Tensor | None = None

    def to(self, device: torch.device) -> "SinkhornResult":
        """What is reported, on another device."""
        error, count, converged = (x.to(device) for x in (self.marginal_error, self.num_iter, self.converged))
        return SinkhornResult(self.potential.to(device), error, count, converged)


_LEAST_UNROLLED = 8  # passes that a gradient goes back through: each leaves a fifth of its error
_MOST_STEPS = 100  # of the adjoint solve
_GAIN = 0.2  # what a step leaves of the error, about


class _Chebyshev:
    """Steps d that solve A x = b from residuals r = b − A x, for a spectrum of A in [1, 2]."""

    def __init__(self) -> None:
        self._rho = 1 / 3  # of Chebyshev's recurrence with centre 3/2 and half width 1/2
        self._step: Tensor | None = None

    def __call__(self, residual: Tensor) -> Tensor:
        if self._step is None:
            self._step = residual / 1.5
        else:
            rho = 1 / (6 - self._rho)
            self._step = rho * self._rho * self._step + 4 * rho * residual
            self._rho = rho
        return self._step


def log_of_mass(mass: Tensor) -> Tensor:
    """log m, −inf where the mass is 0, with gradient 0 there."""
    is_positive = mass > 0
    return torch.where(is_positive, torch.log(torch.where(is_positive, mass, 1)), -torch.inf)


def shares(mass: Tensor, ranks: Ranks) -> Tensor:
    """Masses (*batch, N) over their sum, which may be more than a float holds."""
    part = mass / ranks.largest(mass)[..., None]
    return part / ranks.total(part)[..., None]


def check_options(tol: float, max_iter: int, adjoint: str, iteration: str) -> None:
    """Checks how a normalization is to be solved for, and differentiated."""
    _checks.not_negative("tol", tol)
    _checks.integer("max_iter", max_iter, 1)
    _checks.one_of("adjoint", adjoint, ADJOINTS)
    _checks.one_of("iteration", iteration, ITERATIONS)


@eager
def sinkhorn(
    kernel: Kernel,
    mass: Any = None,
    *,
    tol: float = 1e-3,
    max_iter: int = 50,
    init: Any = None,
    adjoint: str = "implicit",
    iteration: str = "chebyshev",
    history: bool = False,
    value: Tensor | None = None,
) -> SinkhornResult:
    r"""Finds the potential f with :math:`\sum_j e^{f_i} K_{ij} m_j e^{f_j} = 1` for all i, by one lse a step.

    Args:
        kernel: The kernel K, of shape (*batch, N, N).
        mass: Masses m ≥ 0 of shape (*batch, N), or one that broadcasts; those of the kernel, or 1/N each, by default.
            A point of mass 0 influences nothing, which is how padding works.
        tol: Stops once the mass-weighted mean of |Q1 − 1| is below it, for each item of the batch by itself. With
            masses over many decades the lightest points hardly count in it: ask for less if they matter. 0 takes all of
            `max_iter` passes.
        max_iter: The most kernel passes. Missing `tol` by then is reported in the result and warned of, never raised.
        init: A potential to start from, shape (*batch, N).
        adjoint: How to differentiate: "implicit" solves (I + Q)ᵀu = g, "unroll" goes back through the iterations, of
            which it then takes eight or more, "detach" gives the potential no gradient.
        iteration: "chebyshev", or "plain" for the paper's averaging with θ = ½.
        history: Whether to keep the errors of all passes.
        value: Values of shape (*batch, N, C) to apply Q to. The last pass does it, so it costs no pass of its own.

    Example:
        >>> result = sinkhorn(GaussianKernel(torch.randn(200, 3), 0.5))
        >>> bool(result.converged), int(result.num_iter)
        (True, 5)
    """
    asked = {"`tol`": tol, "`max_iter`": max_iter, "`adjoint`": adjoint, "`iteration`": iteration}
    asked |= {"The shape of `mass`": _checks.kind_of_rows(mass, -1), "Whether there is `init`": init is not None}
    kernel.ranks.agree("sinkhorn", kernel.device, asked | {"The shape of `value`": _checks.kind_of_rows(value, -2)})
    check_options(tol, max_iter, adjoint, iteration)
    mass = _checks.mass(kernel.mass if mass is None else mass, kernel)
    log_mass = log_of_mass(mass)
    start = None if init is None else _checks.potential(init, kernel)
    if value is not None:  # points without mass may hold anything, NaN too
        value = torch.where((mass == 0)[..., None], 0, value)
    tensors = mass, *kernel.tensors, *(() if value is None else (value,))
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    with torch.set_grad_enabled(torch.is_grad_enabled() and adjoint == "unroll"):
        result = _iterate(kernel, mass, log_mass, start, tol, max_iter, iteration, None if needs_gradient else value)
    if tol > 0 and not result.converged.all():
        worst = float(result.marginal_error[~result.converged].amax())
        warn_caller(
            f"Sinkhorn stopped after {max_iter} passes with a mean |Q1 − 1| of {worst:.1e}, above tol = {tol:.1e}. "
            "Raise `max_iter` or `tol`, or use float64."
        )
    potential, out = result.potential, result.out
    if adjoint == "implicit" and needs_gradient:
        potential = _Potential.apply(potential, kernel, log_mass, *kernel.tensors)
    if value is not None and out is None:
        keeps_constants = adjoint != "detach"  # whose potential does not follow the kernel
        out = apply(kernel, potential, potential + log_mass, value, keeps_constants=keeps_constants)
    kept = result.history if history else None
    return SinkhornResult(potential, result.marginal_error, result.num_iter, result.converged, kept, out)


def _iterate(
    kernel: Kernel,
    mass: Tensor,
    log_mass: Tensor,
    start: Tensor | None,
    tol: float,
    max_iter: int,
    iteration: str,
    value: Tensor | None,
) -> SinkhornResult:
    """The iteration itself, each item of the batch until it has converged; with `out` if the last pass gave it."""
    share = shares(mass.detach(), kernel.ranks)
    least = _LEAST_UNROLLED if torch.is_grad_enabled() and _has_gradient(kernel, log_mass) else 1
    f = torch.zeros(kernel.shape[:-1], dtype=kernel.dtype, device=kernel.device) if start is None else start
    batch, has_no_mass = f.shape[:-1], log_mass == -torch.inf
    step = _Chebyshev()
    is_active = torch.ones(batch, dtype=torch.bool, device=f.device)
    is_plain = torch.full_like(is_active, iteration == "plain")
    passes = torch.zeros(batch, dtype=torch.int64, device=f.device)
    error = torch.full(batch, torch.inf, dtype=f.dtype, device=f.device)
    errors: list[Tensor] = []
    out = None
    with Progress("Sinkhorn") as progress:
        for count in range(1, max_iter + 1):
            # Items that are done get no keys, which costs nothing where a backend sees it.
            is_last = value is not None and (count == max_iter or bool((error[is_active] * _GAIN <= tol).all()))
            bias = torch.where(is_active[..., None], f + log_mass, -torch.inf)
            mean, lse = kernel.attend(bias, value if is_last else None)
            # Rows that no mass reaches, as of padding in a graph, have no potential, and stay where they are.
            residual = torch.where(is_active[..., None] & (lse > -torch.inf), -(f + lse), 0)
            new = kernel.ranks.total(share * torch.expm1(-residual.detach()).abs())
            # Chebyshev assumes a positive definite kernel: where the error grows, the safe θ = ½ takes over.
            is_plain = is_plain | (is_active & (new > 2 * error))
            error = torch.where(is_active, new, error)
            passes = passes + is_active
            errors.append(error)
            progress.advance(error=error)
            out = None  # of an earlier pass, whose potential is no longer the one
            # Points without mass take no part: their potential follows from those of the others.
            f = torch.where(has_no_mass & is_active[..., None] & (lse > -torch.inf), -lse, f)
            if mean is not None and is_active.all():  # items that were done before would lack theirs
                out = (torch.exp(f + lse)[..., None] * mean).to(mean.dtype)
            if count >= least:
                is_active = is_active & ~(error <= tol)
            if not is_active.any() or count == max_iter:
                break
            fast = 0.5 * residual if start is None and count == 1 else step(residual)
            move = torch.where(is_plain[..., None], 0.5 * residual, fast)
            f = f + torch.where(is_active[..., None], move, 0)
    return SinkhornResult(f, error, passes, error <= tol, tuple(errors), out)


def apply(kernel: Kernel, left: Tensor, right: Tensor, value: Tensor, *, keeps_constants: bool = False) -> Tensor:
    """diag(e^left) K diag(e^right) v, shape (*batch, N, C); points of right = −inf are left out, whatever v is there.

    An operator that keeps constants does so for every kernel: its derivative by the kernel is that of its product with
    v − c, for any constant c, in which less cancels. At points without mass its rows are those of softmax.
    """
    return apply_and_sum(kernel, left, right, value, keeps_constants)[0]


def apply_and_sum(
    kernel: Kernel, left: Tensor, right: Tensor, value: Tensor, keeps_constants: bool
) -> tuple[Tensor, Tensor]:
    """As `apply`, and the sums (*batch, N) of its rows."""
    is_absent = right == -torch.inf
    if is_absent.any():
        value = torch.where(is_absent[..., None], 0, value)
    dtype, has_gradient = value.dtype, _has_gradient(kernel, left, right)
    constant: Tensor | float = 0.0
    if has_gradient:  # averages that are rounded to 16 bits would be differentiated as such
        value = value.to(torch.promote_types(dtype, kernel.dtype))
    if has_gradient and keeps_constants:
        constant = kernel.ranks.mean(right.detach(), value.detach())
        value = value - constant
    out, lse = kernel.attend(right, value)
    assert out is not None
    sums = torch.exp(left + lse)
    if keeps_constants:
        sums = torch.where(is_absent, 1, sums)
    factor = sums[..., None]
    return (factor * out + factor.detach() * constant).to(dtype), sums


def _has_gradient(kernel: Kernel, *tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *kernel.tensors))


def apply_transpose(kernel: Kernel, left: Tensor, right: Tensor, value: Tensor) -> Tensor:
    """diag(e^right) K diag(e^left) v, with weights that contain the sizes of v: light points count for what they give.

    Points without mass whose value is 0, as in padding, are left out.
    """
    is_padding = (right == -torch.inf) & (value.detach() == 0).all(-1)
    sizes = torch.where(is_padding, -torch.inf, sized(value)[0])
    sizes = _largest_of(sizes, kernel.shape[:-2])
    scale = torch.exp(-torch.where(sizes == -torch.inf, 0, sizes))[..., None].to(value.dtype)
    return apply(kernel, right, left + sizes, value * scale)


def _largest_of(x: Tensor, batch: torch.Size) -> Tensor:
    """x (*whole, N), the largest along axes that a batch lacks: (*batch, N), or what broadcasts to it."""
    while x.ndim > len(batch) + 1:
        x = x.amax(0)
    axes = [axis for axis in range(-x.ndim, -1) if batch[axis + 1] == 1 < x.shape[axis]]
    return x.amax(axes, keepdim=True) if axes else x


def solve(
    kernel: Kernel, f: Tensor, log_mass: Tensor, target: Tensor, is_transposed: bool, tensors: tuple[Tensor, ...]
) -> Tensor:
    """(I + Q)⁻¹ target, or its transpose, as a function of everything in it; differentiable to any order."""
    return _Solve.apply(target, f, log_mass, kernel, is_transposed, *tensors)


def _product(kernel: Kernel, f: Tensor, log_mass: Tensor, x: Tensor, is_transposed: bool) -> Tensor:
    """Qx, or Qᵀx, for x (*batch, N)."""
    if is_transposed:
        return apply_transpose(kernel, f, f + log_mass, x[..., None])[..., 0]
    return apply(kernel, f, f + log_mass, x[..., None])[..., 0]


class _Potential(torch.autograd.Function):
    """The solution f of f + lse(f + log m) = 0, as a function of log m and the kernel."""

    @staticmethod
    def forward(solution: Tensor, kernel: Kernel, log_mass: Tensor, *tensors: Tensor) -> Tensor:
        return solution.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.kernel, log_mass, *tensors = inputs
        ctx.save_for_backward(output, log_mass, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        f, log_mass, *tensors = ctx.saved_tensors
        u = solve(ctx.kernel, f, log_mass, grads[0], True, tuple(tensors))

        def minus_lse(log_mass: Tensor, *tensors: Tensor) -> Tensor:
            return -ctx.kernel.replace(*tensors).attend(f + log_mass).lse

        return None, None, *vector_jacobian(minus_lse, (log_mass, *tensors), u)


class _Solve(torch.autograd.Function):
    """x with x + Qx = target, or x + Qᵀx = target."""

    @staticmethod
    def forward(
        target: Tensor, f: Tensor, log_mass: Tensor, kernel: Kernel, is_transposed: bool, *tensors: Tensor
    ) -> Tensor:
        step, x, residual = _Chebyshev(), torch.zeros_like(target), target
        largest, eps = kernel.ranks.largest(target.abs()).amax(), torch.finfo(target.dtype).eps
        gap = largest
        for _ in range(_MOST_STEPS):  # twenty in float64; more only for kernels that are not positive definite
            x = x + step(residual)
            residual = target - x - _product(kernel, f, log_mass, x, is_transposed)
            before, gap = gap, kernel.ranks.largest(residual.abs()).amax()
            # To rounding, as the two parts of a gradient cancel; or until products that are rounded leave no more.
            is_stuck = gap <= 4 * eps**0.75 * largest and gap > 0.5 * before
            if is_stuck or not gap > 16 * eps * largest:
                return x
        warn_caller(
            f"The gradient through the potential is inexact: after {_MOST_STEPS} steps, (I + Q)ᵀu = g has a residual "
            f"of {float(gap / largest):.1e} of g. Is the kernel positive semidefinite? `kernel.smallest_eigenvalue()` "
            'tells; `adjoint="unroll"` needs no such solve.'
        )
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, f, log_mass, ctx.kernel, ctx.is_transposed, *tensors = inputs
        ctx.save_for_backward(output, f, log_mass, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, f, log_mass, *tensors = ctx.saved_tensors
        y = solve(ctx.kernel, f, log_mass, grads[0], not ctx.is_transposed, tuple(tensors))

        def minus_product(f: Tensor, log_mass: Tensor, *tensors: Tensor) -> Tensor:
            return -_product(ctx.kernel.replace(*tensors), f, log_mass, x, ctx.is_transposed)

        grad_f, grad_log_mass, *others = vector_jacobian(minus_product, (f, log_mass, *tensors), y)
        return y, grad_f, grad_log_mass, None, None, *others
