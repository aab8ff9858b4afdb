r"""Geodesics of shapes: Hamiltonian shooting with the diffusion Q_q of their points, or the kernel K_q, as a metric.

    H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j,        q̇ = ∂H/∂p = Q_q p,        ṗ = −∂H/∂q

are the geodesic equations of LDDMM (section 5 and appendix I of the paper), with equal masses. The normalization
depends on q and contributes its adjoint u, the solution of one linear system:

    ṗ_i = Σ_j Q_q[i, j] (p_i · p_j − u_i − u_j) (q_i − q_j) / σ²,        (I + Q_q) u = (p_i · q̇_i)_i.

K_q has no u. The forces act between pairs, along the lines that join them and opposite to one another, and so conserve
momentum and angular momentum whatever the accuracy of the normalization. A step takes about twenty kernel passes.
Matching differentiates it once, where autograd through the normalization would have to do so twice.

With K_q, points that come together move at almost no cost, so geodesics contract on the way and blow up beyond their
end. The spectrum of Q_q stays in [0, 1], and a translation costs the same wherever the points are.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._progress import Progress
from qattn._types import dtype_name
from qattn.kernels import GaussianKernel
from qattn.kernels.mixture import checked_covariances
from qattn.operators.diffusion import Diffusion, diffusion
from qattn.operators.potential_gradient import solve
from qattn.operators.scaling import log_of_mass

__all__ = ["Geodesic", "Hamiltonian", "Matching", "carry", "from_stencil", "match", "shoot", "stencil"]

METRICS = ("diffusion", "kernel")
INTEGRATORS = ("euler", "midpoint")
_MAX_ITER = 50  # of the fixed point for a midpoint
_HISTORY = 20  # gradients that L-BFGS stores


class Hamiltonian:
    r"""Hamiltonian H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j of positions q and momenta p, both of shape (N, d).

    Args:
        sigma: Bandwidth of the Gaussian kernel.
        metric: "diffusion" for Q_q with equal masses, "kernel" for K_q itself.
        tol: Mean of |Q1 − 1| at which the normalization stops. The ends of geodesics have about this error and their
            gradients ten times as much, in float32 at least 5e-4.

    Examples:
        >>> hamiltonian = Hamiltonian(0.3)
        >>> hamiltonian(torch.randn(50, 3), torch.ones(50, 3)).round()  # ½ · 150: Q keeps constants
        tensor(75.)
    """

    def __init__(
        self, sigma: float, *, metric: Literal["diffusion", "kernel"] = "diffusion", tol: float = 1e-5
    ) -> None:
        _checks.positive("`sigma`", sigma)
        _checks.positive("`tol`", tol)
        _checks.one_of("metric", metric, METRICS)
        self.sigma, self.metric, self.tol = float(sigma), metric, tol

    def __call__(self, positions: Tensor, momenta: Tensor) -> Tensor:
        return 0.5 * (momenta * (self.operator(positions) @ momenta)).sum()

    def operator(self, positions: Tensor, init: Tensor | None = None) -> Diffusion:
        """Return Q_q or K_q, whose normalization starts from the potential `init` of similar points."""
        if self.metric == "kernel":
            mass = torch.ones_like(positions[:, 0])
            return diffusion(positions, self.sigma, mass, normalization="none", tol=self.tol)
        return diffusion(positions, self.sigma, tol=self.tol, init=None if init is None else init.detach())

    def derivatives(self, operator: Diffusion, momenta: Tensor) -> tuple[Tensor, Tensor]:
        """Return q̇ = ∂H/∂p and ṗ = −∂H/∂q, both of shape (N, d), given the operator of q."""
        kernel = operator.kernel
        assert isinstance(kernel, GaussianKernel)
        velocity = operator @ momenta
        a = b = momenta
        if self.metric == "diffusion":
            f, log_mass = operator.potential, log_of_mass(operator.mass)
            target = (momenta * velocity).sum(-1)
            u = solve(kernel, f, log_mass, target, kernel.tensors, is_transposed=False, tol=0.0)[:, None]
            one = torch.ones_like(u)
            a, b = torch.cat([momenta, -u, one], dim=-1), torch.cat([momenta, one, -u], dim=-1)
        # With p_i · p_j − u_i − u_j = a_i · b_j, the force is Σ_j Q_ij (a_i · b_j) (x_i − x_j) / σ².
        x = kernel.points - kernel.points.double().mean(0).to(kernel.points).detach()  # (N, d)
        values = torch.cat([b[..., None], b[..., None] * x[:, None]], dim=-1)  # (N, n, 1 + d)
        means = (a[..., None] * (operator @ values.flatten(1)).unflatten(1, values.shape[1:])).sum(1)  # (N, 1 + d)
        return velocity, (means[:, :1] * x - means[:, 1:]) / self.sigma**2


@dataclass(frozen=True)
class Geodesic:
    """A geodesic, sampled in time.

    Attributes:
        times: Times, shape (T,), from 0 on.
        positions: Positions at these times, shape (T, N, d).
        momenta: Momenta at these times, shape (T, N, d).
    """

    times: Tensor
    positions: Tensor
    momenta: Tensor


@dataclass(frozen=True)
class Matching:
    """Result of `match`.

    Attributes:
        momenta: Initial momenta that shoot the source to the target, shape (N, d).
        errors: Mean of ‖q_i(1) − target_i‖² at each evaluation, the first for momenta of 0.
    """

    momenta: Tensor
    errors: tuple[float, ...]


def shoot(
    hamiltonian: Hamiltonian,
    positions: Tensor,
    momenta: Tensor,
    *,
    until: float = 1.0,
    dt: float = 0.1,
    integrator: Literal["euler", "midpoint"] = "euler",
) -> Geodesic:
    """Shoot a geodesic: integrate q̇ = ∂H/∂p, ṗ = −∂H/∂q from time 0, differentiably in positions and momenta.

    Args:
        hamiltonian: Hamiltonian H of the metric.
        positions: Initial positions q, shape (N, d).
        momenta: Initial momenta p, shape (N, d).
        until: Final time, negative to integrate backwards.
        dt: Maximum step; all steps are equal.
        integrator: "euler" is explicit, as in the paper. "midpoint" is implicit and symplectic: energy does not drift
            and the path is reversible, at several times the cost.

    Returns:
        The path at 0 and after every step.

    Examples:
        >>> points = torch.randn(50, 3)
        >>> path = shoot(Hamiltonian(0.3), points, torch.ones(50, 3), until=-0.5)
        >>> torch.allclose(path.positions[-1], points - 0.5, atol=1e-3)  # translations keep their velocity
        True
    """
    q = _checks.one_cloud("positions", positions)
    p = _one_row_each("momenta", momenta, "positions", q)
    _checks.positive("`dt`", dt)
    _checks.not_negative("abs(until)", abs(until))
    _checks.one_of("integrator", integrator, INTEGRATORS)
    advance = _euler if integrator == "euler" else _midpoint
    num_steps = math.ceil(abs(until) / dt * (1 - 1e-9))  # 0.3 / 0.1 rounds to more than 3
    path, f = [(q, p)], None
    with Progress("Shooting", num_steps) as progress:
        for _ in range(num_steps):
            q, p, f = advance(hamiltonian, q, p, until / num_steps, f)
            path.append((q, p))
            progress.advance()
    times = torch.linspace(0, until, num_steps + 1).to(q)
    return Geodesic(times, torch.stack([q for q, _ in path]), torch.stack([p for _, p in path]))


def _euler(
    hamiltonian: Hamiltonian, q: Tensor, p: Tensor, step: float, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions and momenta after an explicit step, and a potential to start the next one from."""
    operator = hamiltonian.operator(q, init)
    velocity, force = hamiltonian.derivatives(operator, p)
    return q + step * velocity, p + step * force, operator.potential


def _midpoint(
    hamiltonian: Hamiltonian, q: Tensor, p: Tensor, step: float, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same after an implicit step with the derivatives at its midpoint, by a fixed-point iteration."""
    goal = 4 * torch.finfo(q.dtype).eps ** 0.75  # the accuracy of the linear systems, and so of the forces
    half_q, half_p = q, p
    for _ in range(_MAX_ITER):
        operator = hamiltonian.operator(half_q, init)
        velocity, force = hamiltonian.derivatives(operator, half_p)
        old_q, old_p, init = half_q.detach(), half_p.detach(), operator.potential
        half_q, half_p = q + 0.5 * step * velocity, p + 0.5 * step * force
        change_q, change_p = (half_q.detach() - old_q).abs().amax(), (half_p.detach() - old_p).abs().amax()
        if change_q <= goal * hamiltonian.sigma and change_p <= goal * p.detach().abs().amax():
            return q + step * velocity, p + step * force, init
    raise ValueError(
        f"The midpoint of a step of {abs(step):.3g} was not found in {_MAX_ITER} iterations. "
        "Take a shorter `dt`, or smaller momenta."
    )


def match(
    hamiltonian: Hamiltonian,
    source: Tensor,
    target: Tensor,
    *,
    dt: float = 0.1,
    integrator: Literal["euler", "midpoint"] = "euler",
    max_iter: int = 50,
) -> Matching:
    """Find momenta that shoot the source to the target in unit time, by L-BFGS on the mean of ‖q_i(1) − target_i‖².

    Momenta start from 0, and are as smooth as the metric where the error does not determine them.

    Args:
        hamiltonian: Hamiltonian H of the metric.
        source: Initial positions, shape (N, d).
        target: Final position of every point, shape (N, d).
        dt: Maximum step of `shoot`.
        integrator: Integrator of `shoot`.
        max_iter: Maximum number of iterations, each with one evaluation, or a few if its first step is not accepted.

    Returns:
        The momenta, and the errors of all evaluations.

    Examples:
        >>> source = torch.randn(50, 3)
        >>> matching = match(Hamiltonian(0.5), source, source + 1, max_iter=3)
        >>> matching.momenta.mean().round()
        tensor(1.)
    """
    source = _checks.one_cloud("source", source).detach()
    target = _one_row_each("target", target, "source", source).detach()
    _checks.integer("max_iter", max_iter, 1)
    difference = target - source
    first_error = float(difference.square().sum(-1).mean())
    if first_error == 0:
        return Matching(torch.zeros_like(source), (0.0,))
    # In a unit in which the first step of L-BFGS, of length 1 in the l1 norm, is the best along the gradient.
    with torch.no_grad():
        operator = hamiltonian.operator(source)
        descent = operator @ difference
        velocity = operator @ descent
        unit = float((velocity * difference).sum() / velocity.square().sum() * descent.abs().sum())
    scaled = torch.zeros_like(source, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [scaled],
        max_iter=max_iter,
        history_size=_HISTORY,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    errors: list[float] = []
    with Progress("Matching") as progress:

        def relative_error() -> Tensor:
            optimizer.zero_grad()
            last = shoot(hamiltonian, source, unit * scaled, dt=dt, integrator=integrator).positions[-1]
            error = (last - target).square().sum(-1).mean()
            (error / first_error).backward()
            errors.append(float(error.detach()))
            progress.advance(error=error.detach())
            return error.detach() / first_error

        optimizer.step(relative_error)
    return Matching(unit * scaled.detach(), tuple(errors))


@torch.no_grad()
def carry(hamiltonian: Hamiltonian, geodesic: Geodesic, points: Tensor) -> Tensor:
    r"""Carry points along a geodesic, ẋ = Σ_j Q_q(x, q_j) p_j, by Euler's method.

    A geodesic moves all of space: one of a few points, or of the `stencil` of a mixture, takes a mesh with it.

    Args:
        hamiltonian: Hamiltonian H of the metric.
        geodesic: Path of the points q that carry the others.
        points: Points x at time 0, shape (M, d).

    Returns:
        The points at the times of the geodesic, shape (T, M, d).
    """
    x = _checks.one_cloud("points", points)
    if x.shape[-1] != geodesic.positions.shape[-1]:
        raise ValueError(
            f"`points` should have {geodesic.positions.shape[-1]} coordinates, as the geodesic; "
            f"got shape {tuple(x.shape)}."
        )
    path, f = [x], None
    for q, p, step in zip(geodesic.positions, geodesic.momenta, geodesic.times.diff().tolist(), strict=False):
        operator = hamiltonian.operator(q, f)
        f = operator.potential
        path.append(path[-1] + step * (operator.extend(path[-1]) @ p))
    return torch.stack(path)


def stencil(means: Tensor, covariances: Tensor) -> Tensor:
    r"""Return the points x ± s_k e_k of Gaussians with means x and covariances Σ_k s_k² e_k e_kᵀ, e_k unit vectors.

    Args:
        means: Means x, shape (*batch, N, d).
        covariances: Full matrices (*batch, N, d, d), diagonals (*batch, N, d), or variances (*batch, N).

    Returns:
        Points of shape (*batch, 2 d N, d), the 2 d points of a component in a row; `from_stencil` is the inverse.

    Examples:
        >>> points = stencil(torch.zeros(1, 3), torch.tensor([[1.0, 4.0, 9.0]]))
        >>> points.shape
        torch.Size([6, 3])
        >>> from_stencil(points)[1].diagonal(dim1=1, dim2=2)
        tensor([[1., 4., 9.]])
    """
    x = _checks.points("means", means)
    sigma, kind = checked_covariances(covariances, x)
    if kind != "full":
        sigma = torch.diag_embed(sigma if kind == "diagonal" else sigma[..., None].expand_as(x))
    axes, roots = _Axes.apply(sigma)
    offsets = (axes * roots[..., None, :]).mT  # (*batch, N, d, d), one row per axis
    return (x[..., None, :] + torch.cat([offsets, -offsets], dim=-2)).flatten(-3, -2)


class _Axes(torch.autograd.Function):
    """Axes E, one per column, and lengths s of ellipsoids: matrices (*batch, d, d) are Σ = E diag(s²) Eᵀ.

    With B = Eᵀ dΣ E, lengths change by ½ B_kk / s_k, and axes by dE = E F with F_jk = B_jk / (s_k² − s_j²). The axes of
    equal lengths are not unique, and F is 0 / 0. It is replaced by B_jk / s_k (s_j + s_k), with which E diag(s) changes
    like the symmetric root of Σ: functions that do not depend on the choice of axes then have their exact gradient.
    Axes of length 0 keep their direction.
    """

    @staticmethod
    def forward(matrices: Tensor) -> tuple[Tensor, Tensor]:
        squares, axes = torch.linalg.eigh(matrices)
        return axes, squares.clamp(min=0).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        axes, s = ctx.saved_tensors
        squares, has_length = s.square(), s > 0
        gap = squares[..., None, :] - squares[..., :, None]  # s_k² − s_j² in row j and column k
        smallest_gap = torch.finfo(s.dtype).eps ** 0.5 * squares.amax(-1)[..., None, None]
        divisor_if_equal = s[..., None, :] * (s[..., None, :] + s[..., :, None])
        divisor = torch.where(gap.abs() > smallest_gap, gap, divisor_if_equal)
        by_axes = torch.where(divisor != 0, axes.mT @ grads[0] / torch.where(divisor != 0, divisor, 1), 0)
        by_lengths = torch.where(has_length, 0.5 * grads[1] / torch.where(has_length, s, 1), 0)
        off_diagonal = by_axes - torch.diag_embed(by_axes.diagonal(dim1=-2, dim2=-1))
        result = axes @ (off_diagonal + torch.diag_embed(by_lengths)) @ axes.mT
        return 0.5 * (result + result.mT)


def from_stencil(points: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the points of a stencil into a Gaussian mixture again.

    Args:
        points: Points of a `stencil`, moved or not, shape (*batch, 2 d N, d).

    Returns:
        Means of shape (*batch, N, d) and covariances of shape (*batch, N, d, d).
    """
    x = _checks.points("points", points)
    d = x.shape[-1]
    if x.shape[-2] % (2 * d):
        raise ValueError(
            f"The number of `points` should be a multiple of 2 d = {2 * d}, as in stencils; got {x.shape[-2]}."
        )
    x = x.unflatten(-2, (-1, 2 * d))
    means = x.mean(-2)
    offsets = x - means[..., None, :]
    return means, 0.5 * offsets.mT @ offsets


def _one_row_each(name: str, vectors: Tensor, other: str, points: Tensor) -> Tensor:
    """Check vectors (N, d) at the points (N, d) of another argument."""
    tensor = _checks.points(name, vectors)
    expected, got = (f"{_checks.shape_of(x)} {dtype_name(x.dtype)} {x.device}" for x in (points, tensor))
    if expected != got:
        raise ValueError(f"`{name}` should be like `{other}`, {expected}, one row per point; got {got}.")
    return tensor
