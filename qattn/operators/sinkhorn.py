r"""Symmetric Sinkhorn normalization: the potential f with f + lse(f + log m) = 0.

Then Q = ΛKMΛ, Λ = diag(e^f), M = diag(m), preserves constants. The error of the iteration f ← f − θ (f + lse) obeys
e ← (I − θ (I + Q)) e, and the spectrum of I + Q lies in [1, 2] for every positive definite kernel. So θ = ½, the choice
of the paper, halves the error in each step, and Chebyshev's iteration on [1, 2] divides it by 5.8. From a cold start, a
first step with θ = ½ gets close enough for this linear theory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index
from qattn._eager import eager
from qattn._progress import Progress
from qattn._types import ArrayLike, MassLike
from qattn._warning import warn_caller
from qattn.kernels.base import Kernel
from qattn.mass import mass_of
from qattn.operators.potential_gradient import Chebyshev, implicit_potential
from qattn.operators.scaling import apply, has_massless, log_of_mass, needs_gradient, shares
from qattn.ranks import kind_of_rows

__all__ = ["SinkhornResult", "Solver", "checked_potential", "sinkhorn", "solve_potential"]

_MIN_UNROLLED = 8  # passes that are differentiated, each of which divides the error of a gradient by about five
_GAIN = 0.2  # factor by which a step reduces the error, about


@dataclass(frozen=True)
class Solver:
    """Options of Sinkhorn normalization, and of its derivative.

    Attributes:
        max_iter: Largest number of kernel passes. If the tolerance is not met by then, a warning is issued.
        iteration: "chebyshev", or "plain" for the paper's averaging with θ = ½.
        adjoint: "implicit" differentiates by solving (I + Q)ᵀu = g. "unroll" differentiates the iterations, at least
            eight of them. "detach" does not differentiate the potential.
    """

    max_iter: int = 50
    iteration: Literal["chebyshev", "plain"] = "chebyshev"
    adjoint: Literal["implicit", "unroll", "detach"] = "implicit"

    def __post_init__(self) -> None:
        _checks.integer("max_iter", self.max_iter, 1)
        _checks.one_of("iteration", self.iteration, ("chebyshev", "plain"))
        _checks.one_of("adjoint", self.adjoint, ("implicit", "unroll", "detach"))


@dataclass(frozen=True)
class SinkhornResult:
    """Result of `sinkhorn`.

    Attributes:
        potential: Potential f, shape (*batch, N).
        marginal_error: Mass-weighted mean of |Q1 − 1| at this potential, shape (*batch,).
        num_iter: Number of kernel passes, including the last one, which measures the error, shape (*batch,).
        converged: Whether the error is below `tol`, shape (*batch,).
        history: Errors of all passes, each of shape (*batch,).
    """

    potential: Tensor
    marginal_error: Tensor
    num_iter: Tensor
    converged: Tensor
    history: tuple[Tensor, ...] = ()

    def to(self, device: torch.device) -> "SinkhornResult":
        """Return the result on another device."""
        return self._mapped(lambda x: x.to(device))

    def indexed(self, index: Index) -> "SinkhornResult":
        """Return the result of some items of the batch."""
        return self._mapped(lambda x: x[index])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "SinkhornResult":
        tensors = self.potential, self.marginal_error, self.num_iter, self.converged
        potential, error, count, converged = map(change, tensors)
        return SinkhornResult(potential, error, count, converged, tuple(map(change, self.history)))


@eager
def sinkhorn(
    kernel: Kernel,
    mass: MassLike | None = None,
    *,
    tol: float = 1e-3,
    solver: Solver = Solver(),  # noqa: B008 (it is frozen)
    init: ArrayLike | None = None,
) -> SinkhornResult:
    r"""Find the potential f with Σ_j e^{f_i} K_ij m_j e^{f_j} = 1 for all i, by one lse per step.

    Args:
        kernel: Kernel K, of shape (*batch, N, N).
        mass: Masses m ≥ 0 of shape (*batch, N), or one that broadcasts; by default those of the kernel, or 1/N each.
            Points of mass 0 have no influence, so they can be padding. "density" takes those of
            `qattn.mass.density(kernel)`.
        tol: Mass-weighted mean of |Q1 − 1| at which to stop, for each item of the batch. With masses over many decades
            the lightest points hardly count in it: use a smaller `tol` if they matter. With 0, all of
            `solver.max_iter` passes are made.
        solver: Options of the iteration and of its derivative.
        init: Potential to start from, shape (*batch, N).

    Returns:
        The potential, with the error that was reached. A missed tolerance warns, and shows in `converged`.

    Examples:
        >>> result = sinkhorn(GaussianKernel(torch.randn(200, 3), 0.5))
        >>> bool(result.converged), int(result.num_iter)
        (True, 5)
    """
    options = {"`tol`": tol, "`solver`": solver, "Whether there is `init`": init is not None}
    kernel.ranks.agree("sinkhorn", kernel.device, options | {"The shape of `mass`": kind_of_rows(mass, -1)})
    _checks.not_negative("tol", tol)
    start = None if init is None else checked_potential(init, kernel)
    mass = mass_of(mass, kernel)
    return solve_potential(kernel, mass, has_massless(mass, kernel.ranks), tol, solver, start, None)[0]


def checked_potential(numbers: ArrayLike, kernel: Kernel) -> Tensor:
    """Convert an initial potential to a tensor (*batch, N), for a kernel of shape (*batch, N, N)."""
    tensor = _checks.floating("init", kernel.ranks.local_part("init", numbers, -1)).to(kernel.device, kernel.dtype)
    if tensor.shape != kernel.shape[:-1]:
        raise ValueError(
            f"`init` should have shape {tuple(kernel.shape[:-1])}, as a potential of the kernel has; "
            f"got {_checks.shape_of(tensor)}."
        )
    _checks.finite("init", tensor, "Leave `init` out.")
    return tensor


def solve_potential(
    kernel: Kernel,
    mass: Tensor,
    some_massless: bool,
    tol: float,
    solver: Solver,
    start: Tensor | None,
    value: Tensor | None,
) -> tuple[SinkhornResult, Tensor | None]:
    """Solve as `sinkhorn` does, without checks, and apply Q to values (*batch, N, C), if any.

    `some_massless` says whether any mass is 0. Q is applied in the last pass of the iteration, unless a gradient is
    required.
    """
    log_mass = log_of_mass(mass)
    if value is not None and some_massless:  # where values may be NaN
        value = torch.where((mass == 0)[..., None], 0, value)
    has_gradient = needs_gradient(kernel, mass, *(() if value is None else (value,)))
    with torch.set_grad_enabled(torch.is_grad_enabled() and solver.adjoint == "unroll"):
        result, out = _iterate(
            kernel, mass, log_mass, some_massless, start, tol, solver, None if has_gradient else value
        )
    if tol > 0 and not result.converged.all():
        worst = float(result.marginal_error[~result.converged].amax())
        warn_caller(
            f"Sinkhorn stopped after {solver.max_iter} passes with a mean |Q1 − 1| of {worst:.1e}, above tol = "
            f"{tol:.1e}. Raise `tol` or `max_iter`, as in `solver=Solver(max_iter=200)`, or use float64."
        )
    f = result.potential
    if solver.adjoint == "implicit" and has_gradient:
        f = implicit_potential(f, result.marginal_error, kernel, log_mass)
        result = SinkhornResult(f, result.marginal_error, result.num_iter, result.converged, result.history)
    if value is not None and out is None:
        keeps_constants = solver.adjoint != "detach"  # a detached potential does not follow the kernel
        out = apply(kernel, f, f + log_mass, value, keeps_constants=keeps_constants, all_rows=some_massless)
    return result, out


def _iterate(
    kernel: Kernel,
    mass: Tensor,
    log_mass: Tensor,
    some_massless: bool,
    start: Tensor | None,
    tol: float,
    solver: Solver,
    value: Tensor | None,
) -> tuple[SinkhornResult, Tensor | None]:
    """Iterate until each item of the batch has converged; also return Q applied to values, if the last pass did it.

    Decisions are made on the host, from the errors of the items, and a GPU is waited for nowhere else. The potential
    of points without mass influences no other: it is −lse in the last pass of an item, whose rows must all be right.
    If that pass was not foreseen to be the last, it takes one more.
    """
    share = shares(mass.detach(), kernel.ranks)
    min_iter = _MIN_UNROLLED if torch.is_grad_enabled() and needs_gradient(kernel, log_mass) else 1
    f = torch.zeros(kernel.shape[:-1], dtype=kernel.dtype, device=kernel.device) if start is None else start
    has_no_mass = log_mass == -torch.inf
    batch, step = f.shape[:-1], Chebyshev()
    error, passes = np.full(batch, np.inf), np.zeros(batch, np.int64)
    is_active, is_plain = np.ones(batch, bool), np.full(batch, solver.iteration == "plain")
    errors: list[np.ndarray] = []
    are_rows_right, out = np.zeros(batch, bool), None
    with Progress("Sinkhorn") as progress:
        for count in range(1, solver.max_iter + 1):
            is_ending = is_active & ~(error * _GAIN > tol)  # items that are expected to converge in this pass
            is_last = count == solver.max_iter or bool((is_ending == is_active).all())
            all_rows = some_massless and (is_last or bool(is_ending.any()))
            active = None if is_active.all() else _as_tensor(is_active, f.device)[..., None]
            bias = f + log_mass
            if active is not None:  # items that have converged get no keys, which backends can skip
                bias = torch.where(active, bias, -torch.inf)
            mean, lse = kernel.attend(bias, value if is_last else None, all_rows=all_rows)
            are_rows_right = np.where(is_active, all_rows, are_rows_right)
            # Rows that no mass reaches, such as padding in a graph, have no potential, and are left unchanged.
            log_sums = torch.nan_to_num(f + lse, nan=torch.nan, posinf=torch.inf, neginf=0.0)
            if some_massless:
                log_sums = torch.where(has_no_mass, 0, log_sums)
            if all_rows:
                f = torch.where(has_no_mass & (lse > -torch.inf), -lse, f)
            excess = torch.expm1(log_sums.detach()).abs_().mul_(share)
            new = np.array(kernel.ranks.total(excess).tolist()).reshape(batch)
            # Chebyshev assumes a positive definite kernel: if the error grows, switch to the safe θ = ½.
            is_plain = is_plain | (is_active & (new > 2 * error))
            error, passes = np.where(is_active, new, error), passes + is_active
            errors.append(error)
            progress.advance(error=error)
            if mean is not None and active is None:  # converged items have no keys in this pass, and so no mean
                out = (torch.exp(f + lse)[..., None] * mean).to(mean.dtype)
            if count >= min_iter:
                is_active = is_active & ~(error <= tol)
            if not is_active.any() or count == solver.max_iter:
                break
            out = None  # it belongs to another potential
            move = -0.5 * log_sums if start is None and count == 1 else step(-log_sums)
            if is_plain.any():
                move = torch.where(_as_tensor(is_plain, f.device)[..., None], -0.5 * log_sums, move)
            if not is_active.all():
                move = torch.where(_as_tensor(is_active, f.device)[..., None], move, 0)
            f = f + move
    if some_massless and not are_rows_right.all():
        lse = kernel.attend(f + log_mass).lse
        f = torch.where(has_no_mass & (lse > -torch.inf), -lse, f)
    numbers = [torch.as_tensor(x, dtype=f.dtype, device=f.device) for x in errors]
    converged, counts = (_as_tensor(x, f.device) for x in (error <= tol, passes))
    return SinkhornResult(f, numbers[-1], counts, converged, tuple(numbers)), out


def _as_tensor(x: np.ndarray, device: torch.device) -> Tensor:
    """Convert an array, or the scalar that NumPy makes of an array without axes, which torch may refuse."""
    return torch.as_tensor(np.asarray(x), device=device)
