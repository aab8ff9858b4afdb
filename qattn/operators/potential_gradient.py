r"""Derivatives of the Sinkhorn potential, by the implicit function theorem.

The potential f solves f + lse(f + log m) = 0. For a cotangent g of f, solve

    (I + Q)ᵀ u = g,        and u is the cotangent of −lse(f + log m) at fixed f.

The spectrum of I + Q lies in [1, 2] for every positive definite kernel, so Chebyshev's iteration for the linear system
divides the error by 5.8 per step. All products are calls of `attend`, and the solutions are differentiable again.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qattn._autocast import without_autocast
from qattn._vector_jacobian import vector_jacobian
from qattn._warning import warn_caller
from qattn.kernels.base import Kernel
from qattn.operators.scaling import apply, apply_transpose

__all__ = ["Chebyshev", "implicit_potential", "solve"]

_MAX_STEPS = 100  # twenty suffice in float64, unless the kernel is not positive definite
_GAIN = 0.2  # factor by which a step reduces the residual, about
_SHARE = 0.3  # residual of the adjoint, relative to the marginal error of the potential


class Chebyshev:
    """Chebyshev's iteration for A x = b with the spectrum of A in [1, 2]: from residuals b − A x to steps of x."""

    def __init__(self) -> None:
        self._rho = 1 / 3  # of the recurrence with center 3/2 and half width 1/2
        self._step: Tensor | None = None

    def __call__(self, residual: Tensor) -> Tensor:
        if self._step is None:
            self._step = residual / 1.5
        else:
            rho = 1 / (6 - self._rho)
            self._step = rho * self._rho * self._step + 4 * rho * residual
            self._rho = rho
        return self._step


def implicit_potential(solution: Tensor, error: Tensor, kernel: Kernel, log_mass: Tensor) -> Tensor:
    """Attach derivatives with respect to the kernel and log m to a solution f of f + lse(f + log m) = 0.

    The linear system is solved somewhat more accurately than the potential, whose marginal errors are `error`.
    """
    return _Potential.apply(solution, error, kernel, log_mass, *kernel.tensors)


def solve(
    kernel: Kernel,
    f: Tensor,
    log_mass: Tensor,
    target: Tensor,
    tensors: tuple[Tensor, ...],
    *,
    is_transposed: bool,
    tol: Tensor | float,
) -> Tensor:
    """Solve (I + Q) x = target, or (I + Q)ᵀ x = target, differentiably to any order in all arguments.

    In each item of the batch, the largest residual is below `tol` times the largest entry of the target, or due to
    rounding.
    """
    return _Solve.apply(target, f, log_mass, kernel, is_transposed, tol, *tensors)


def _product(kernel: Kernel, f: Tensor, log_mass: Tensor, x: Tensor, is_transposed: bool) -> Tensor:
    """Compute Qx, or Qᵀx, for x (*batch, N), to an accuracy relative to the largest entry."""
    if is_transposed:
        return apply_transpose(kernel, f, f + log_mass, x[..., None], all_rows=False)[..., 0]
    return apply(kernel, f, f + log_mass, x[..., None])[..., 0]


class _Potential(torch.autograd.Function):
    @staticmethod
    def forward(solution: Tensor, error: Tensor, kernel: Kernel, log_mass: Tensor, *tensors: Tensor) -> Tensor:
        return solution.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.error, ctx.kernel, log_mass, *tensors = inputs
        ctx.save_for_backward(output, log_mass, *tensors)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        f, log_mass, *tensors = ctx.saved_tensors
        u = solve(ctx.kernel, f, log_mass, grads[0], tuple(tensors), is_transposed=True, tol=_SHARE * ctx.error)

        def minus_lse(log_mass: Tensor, *tensors: Tensor) -> Tensor:
            return -ctx.kernel.replace(*tensors).attend(f + log_mass).lse

        return None, None, None, *vector_jacobian(minus_lse, (log_mass, *tensors), u)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(
        target: Tensor,
        f: Tensor,
        log_mass: Tensor,
        kernel: Kernel,
        is_transposed: bool,
        tol: Tensor | float,
        *tensors: Tensor,
    ) -> Tensor:
        step, x, residual = Chebyshev(), torch.zeros_like(target), target
        largest, eps = kernel.ranks.largest(target.abs()), torch.finfo(target.dtype).eps  # of each item of the batch
        goals = torch.clamp(torch.zeros_like(largest) + tol, min=16 * eps)  # relative: cotangents of items may differ
        gap = ratio = math.inf
        for _ in range(_MAX_STEPS if largest.numel() else 0):
            x = x + step(residual)
            if ratio <= 1 / _GAIN:  # the step just made reaches the goals, which need not be measured
                return x
            residual = target - x - _product(kernel, f, log_mass, x, is_transposed)
            gaps = torch.where(largest > 0, kernel.ranks.largest(residual.abs()) / largest, 0)
            before = gap
            gap, ratio = torch.stack([gaps.amax(), (gaps / goals).amax()]).tolist()  # the only wait for a GPU
            is_stuck = gap <= 4 * eps**0.75 and gap > 0.5 * before  # by the rounding of products
            if is_stuck or not ratio > 1:
                return x
        if largest.numel():
            warn_caller(
                f"The gradient through the potential is inexact: after {_MAX_STEPS} steps, (I + Q)ᵀu = g has a "
                f"residual of {gap:.1e} of g. Check `kernel.smallest_eigenvalue()`: the kernel may not be positive "
                'semidefinite. `Solver(adjoint="unroll")` does not solve this equation.'
            )
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, f, log_mass, ctx.kernel, ctx.is_transposed, ctx.tol, *tensors = inputs
        ctx.save_for_backward(output, f, log_mass, *tensors)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, f, log_mass, *tensors = ctx.saved_tensors
        is_transposed = not ctx.is_transposed
        y = solve(ctx.kernel, f, log_mass, grads[0], tuple(tensors), is_transposed=is_transposed, tol=ctx.tol)

        def minus_product(f: Tensor, log_mass: Tensor, *tensors: Tensor) -> Tensor:
            return -_product(ctx.kernel.replace(*tensors), f, log_mass, x, ctx.is_transposed)

        grad_f, grad_log_mass, *others = vector_jacobian(minus_product, (f, log_mass, *tensors), y)
        return y, grad_f, grad_log_mass, None, None, None, *others
