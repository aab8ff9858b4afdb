r"""Geodesics of shapes: Hamiltonian shooting with the diffusion Q_q of their points as a metric, or the kernel K_q.

    H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j,        q̇ = ∂H/∂p = Q_q p,        ṗ = −∂H/∂q,

the geodesic equations of LDDMM (section 5 and appendix I of the paper), with equal masses. A normalisation that changes
with q adds its adjoint u, which one linear system gives:

    ṗ_i = Σ_j Q_q[i, j] (p_i · p_j − u_i − u_j) (q_i − q_j) / σ²,        (I + Q_q) u = (p_i · q̇_i)_i,

and K_q has no u. These are forces between pairs, along the lines that join them, opposite to one another: however far
normalising went, they keep momentum and angular momentum. A step is some twenty passes of the kernel, and matching
differentiates it once, where autograd through the normalisation would have to do so twice.

With K_q, points that come together move for almost nothing, so geodesics contract on the way, and blow up beyond its
end. The spectrum of Q_q stays in [0, 1], and a translation costs the same wherever points are.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._progress import Progress
from qattn.kernels import GaussianKernel
from qattn.operators import Diffusion, diffusion
from qattn.solver import log_of_mass, solve

__all__ = ["Geodesic", "Hamiltonian", "Matching", "carry", "from_stencil", "match", "shoot", "stencil"]

METRICS = ("diffusion", "kernel")
INTEGRATORS = ("euler", "midpoint")
_MOST = 50  # iterations for a midpoint
_HISTORY = 20  # gradients that L-BFGS remembers


class Hamiltonian:
    r"""H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j for positions q and momenta p of shape (N, d).

    Args:
        sigma: The bandwidth of the Gaussian kernel.
        metric: "diffusion" for Q_q with equal masses, "kernel" for K_q itself.
        tol: The mean of |Q1 − 1| at which normalising stops. Ends of geodesics err by about as much, and gradients of
            them by ten times that; in float32 by 5e-4 at best.

    Example:
        >>> hamiltonian = Hamiltonian(0.3)
        >>> hamiltonian(torch.randn(50, 3), torch.ones(50, 3)).round()  # ½ · 150: Q keeps constants
        tensor(75.)
    """

    def __init__(self, sigma: float, *, metric: str = "diffusion", tol: float = 1e-5) -> None:
        _checks.positive("`sigma`", sigma)
        _checks.positive("`tol`", tol)
        _checks.one_of("metric", metric, METRICS)
        self.sigma, self.metric, self.tol = float(sigma), metric, tol

    def __call__(self, positions: Tensor, momenta: Tensor) -> Tensor:
        return 0.5 * (momenta * (self.operator(positions) @ momenta)).sum()

    def operator(self, positions: Tensor, init: Tensor | None = None) -> Diffusion:
        """Q_q, or K_q; normalising starts from the potential of similar points."""
        if self.metric == "kernel":
            mass = torch.ones_like(positions[:, 0])
            return diffusion(positions, self.sigma, mass, normalization="none", tol=self.tol)
        return diffusion(positions, self.sigma, tol=self.tol, init=None if init is None else init.detach())

    def derivatives(self, operator: Diffusion, momenta: Tensor) -> tuple[Tensor, Tensor]:
        """q̇ = ∂H/∂p and ṗ = −∂H/∂q, both (N, d), from the operator of q."""
        kernel = operator.kernel
        assert isinstance(kernel, GaussianKernel)
        velocity = operator @ momenta
        a = b = momenta
        if self.metric == "diffusion":
            f, log_mass = operator.potential, log_of_mass(operator.mass)
            u = solve(kernel, f, log_mass, (momenta * velocity).sum(-1), False, kernel.tensors)[:, None]
            one = torch.ones_like(u)
            a, b = torch.cat([momenta, -u, one], dim=-1), torch.cat([momenta, one, -u], dim=-1)
        # With p_i · p_j − u_i − u_j = a_i · b_j, the force is that of Σ_j Q_ij (a_i · b_j) (x_i − x_j).
        x = kernel.centred  # (N, d)
        values = torch.cat([b[..., None], b[..., None] * x[:, None]], dim=-1)  # (N, n, 1 + d)
        means = (a[..., None] * (operator @ values.flatten(1)).unflatten(1, values.shape[1:])).sum(1)  # (N, 1 + d)
        return velocity, (means[:, :1] * x - means[:, 1:]) / self.sigma**2


@dataclass(frozen=True)
class Geodesic:
    """A path of shapes.

    Attributes:
        times: When, shape (T,), the first of them 0.
        positions: Where the points are, shape (T, N, d).
        momenta: Their momenta, shape (T, N, d).
    """

    times: Tensor
    positions: Tensor
    momenta: Tensor


@dataclass(frozen=True)
class Matching:
    """What `match` found.

    Attributes:
        momenta: Those that shoot the source to the target, shape (N, d).
        errors: The mean of ‖q_i(1) − target_i‖² at each evaluation, the first that of the source itself.
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
    integrator: str = "euler",
) -> Geodesic:
    """The geodesic that starts at time 0 from positions (N, d) with momenta (N, d); differentiable by both.

    Args:
        hamiltonian: The metric.
        positions: Where the points start.
        momenta: With what momenta.
        until: The time of its end, negative for the past.
        dt: The longest step; all are of the same length.
        integrator: "euler" is explicit, as in the paper; "midpoint" is implicit and symplectic, so that energy does
            not drift and the past leads back, for several times the passes.

    Example:
        >>> points = torch.randn(50, 3)
        >>> path = shoot(Hamiltonian(0.3), points, torch.ones(50, 3), until=-0.5)
        >>> torch.allclose(path.positions[-1], points - 0.5, atol=1e-3)  # translations keep their velocity
        True
    """
    q = _checks.one_shape("positions", positions)
    p = _checks.one_shape("momenta", momenta, like=("positions", q))
    _checks.positive("`dt`", dt)
    _checks.not_negative("abs(until)", abs(until))
    _checks.one_of("integrator", integrator, INTEGRATORS)
    advance = _euler if integrator == "euler" else _midpoint
    count = math.ceil(abs(until) / dt * (1 - 1e-9))  # 0.3 / 0.1 is a little more than 3
    path, f = [(q, p)], None
    with Progress("Shooting", count) as progress:
        for _ in range(count):
            q, p, f = advance(hamiltonian, q, p, until / count, f)
            path.append((q, p))
            progress.advance()
    times = torch.linspace(0, until, count + 1).to(q)
    return Geodesic(times, torch.stack([q for q, _ in path]), torch.stack([p for _, p in path]))


def _euler(
    hamiltonian: Hamiltonian, q: Tensor, p: Tensor, step: float, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and momenta a step later, and a potential to start from there."""
    operator = hamiltonian.operator(q, init)
    velocity, force = hamiltonian.derivatives(operator, p)
    return q + step * velocity, p + step * force, operator.potential


def _midpoint(
    hamiltonian: Hamiltonian, q: Tensor, p: Tensor, step: float, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, by the derivatives halfway, which a fixed-point iteration finds."""
    goal = 4 * torch.finfo(q.dtype).eps ** 0.75  # that of the linear systems, which forces depend on
    half_q, half_p = q, p
    for _ in range(_MOST):
        operator = hamiltonian.operator(half_q, init)
        velocity, force = hamiltonian.derivatives(operator, half_p)
        before, init = (half_q.detach(), half_p.detach()), operator.potential
        half_q, half_p = q + 0.5 * step * velocity, p + 0.5 * step * force
        moved, pushed = ((new - old).detach().abs().amax() for new, old in zip((half_q, half_p), before, strict=True))
        if moved <= goal * hamiltonian.sigma and pushed <= goal * p.detach().abs().amax():
            return q + step * velocity, p + step * force, init
    raise ValueError(
        f"The midpoint of a step of {abs(step):.3g} was not found in {_MOST} iterations. "
        "Take a shorter `dt`, or smaller momenta."
    )


def match(
    hamiltonian: Hamiltonian,
    source: Tensor,
    target: Tensor,
    *,
    dt: float = 0.1,
    integrator: str = "euler",
    max_iter: int = 50,
) -> Matching:
    """Momenta that shoot the source to the target in a unit of time, by L-BFGS on the mean of ‖q_i(1) − target_i‖².

    Momenta start from 0, and stay as smooth as the metric is where the source cannot tell.

    Args:
        hamiltonian: The metric.
        source: Where the points start, shape (N, d).
        target: Where each of them should get, shape (N, d).
        dt: As of `shoot`.
        integrator: As of `shoot`.
        max_iter: The most iterations, with one evaluation each, or a few where the first step is not a good one.

    Example:
        >>> source = torch.randn(50, 3)
        >>> found = match(Hamiltonian(0.5), source, source + 1, max_iter=3)
        >>> found.momenta.mean().round()
        tensor(1.)
    """
    source = _checks.one_shape("source", source).detach()
    target = _checks.one_shape("target", target, like=("source", source)).detach()
    _checks.integer("max_iter", max_iter, 1)
    way = target - source
    first = float(way.square().sum(-1).mean())
    if first == 0:
        return Matching(torch.zeros_like(source), (0.0,))
    # In a unit in which the first step of L-BFGS, of length 1 in the sum of sizes, is the best along the gradient.
    with torch.no_grad():
        operator = hamiltonian.operator(source)
        downhill = operator @ way
        velocity = operator @ downhill
        unit = float((velocity * way).sum() / velocity.square().sum() * downhill.abs().sum())
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
            (error / first).backward()
            errors.append(float(error.detach()))
            progress.advance(error=error.detach())
            return error.detach() / first

        optimizer.step(relative_error)
    return Matching(unit * scaled.detach(), tuple(errors))


@torch.no_grad()
def carry(hamiltonian: Hamiltonian, geodesic: Geodesic, points: Tensor) -> Tensor:
    r"""Points (M, d) that a geodesic carries along, ẋ = Σ_j Q_q(x, q_j) p_j, by Euler's method: shape (T, M, d).

    A geodesic moves all of space: that of a few points, or of the `stencil` of a mixture, takes a mesh with it.
    """
    x = _checks.one_shape("points", points)
    _checks.same_dimension(x, geodesic.positions)
    path, f = [x], None
    for q, p, step in zip(geodesic.positions, geodesic.momenta, geodesic.times.diff().tolist(), strict=False):
        operator = hamiltonian.operator(q, f)
        f = operator.potential
        path.append(path[-1] + step * (operator.extend(path[-1]) @ p))
    return torch.stack(path)


def stencil(means: Tensor, covariances: Tensor) -> Tensor:
    r"""The points x ± s_k e_k of Gaussians of means x and covariances Σ_k s_k² e_k e_kᵀ, with unit vectors e_k.

    Args:
        means: Shape (*batch, N, d).
        covariances: Shape (*batch, N, d, d), (*batch, N, d) for diagonal ones, or (*batch, N) for variances.

    Returns:
        Points of shape (*batch, 2 d N, d), the 2 d of a component one after another; `from_stencil` leads back.

    Example:
        >>> points = stencil(torch.zeros(1, 3), torch.tensor([[1.0, 4.0, 9.0]]))
        >>> points.shape
        torch.Size([6, 3])
        >>> from_stencil(points)[1].diagonal(dim1=1, dim2=2)
        tensor([[1., 4., 9.]])
    """
    x = _checks.points("means", means)
    sigma, kind = _checks.covariances(covariances, x)
    if kind != "full":
        sigma = torch.diag_embed(sigma if kind == "diagonal" else sigma[..., None].expand_as(x))
    axes, roots = _Axes.apply(sigma)
    offsets = (axes * roots[..., None, :]).mT  # (*batch, N, d, d), a row for each axis
    return (x[..., None, :] + torch.cat([offsets, -offsets], dim=-2)).flatten(-3, -2)


class _Axes(torch.autograd.Function):
    """Axes E, a column each, and lengths s of ellipsoids: matrices (*batch, d, d) are E diag(s²) Eᵀ.

    With B = Eᵀ dΣ E, lengths change by ½ B_kk / s_k, and axes by dE = E F with F_jk = B_jk / (s_k² − s_j²). Axes of one
    length could as well be others, and F is 0 / 0. There it is B_jk / s_k (s_j + s_k) instead: E diag(s) then changes
    like the symmetric root of Σ, and functions of it that do not depend on the choice of axes have their gradient. Axes
    of length 0 keep their direction.
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
        near = torch.finfo(s.dtype).eps ** 0.5 * squares.amax(-1)[..., None, None]
        alike = s[..., None, :] * (s[..., None, :] + s[..., :, None])
        divisor = torch.where(gap.abs() > near, gap, alike)
        turned = torch.where(divisor != 0, axes.mT @ grads[0] / torch.where(divisor != 0, divisor, 1), 0)
        longer = torch.where(has_length, 0.5 * grads[1] / torch.where(has_length, s, 1), 0)
        off_diagonal = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
        result = axes @ (off_diagonal + torch.diag_embed(longer)) @ axes.mT
        return 0.5 * (result + result.mT)


def from_stencil(points: Tensor) -> tuple[Tensor, Tensor]:
    """Means (*batch, N, d) and covariances (*batch, N, d, d) of Gaussians whose `stencil` was moved to points."""
    x = _checks.points("points", points)
    d = x.shape[-1]
    _checks.divisible("the number of points", x.shape[-2], "2 d", 2 * d)
    x = x.unflatten(-2, (-1, 2 * d))
    means = x.mean(-2)
    apart = x - means[..., None, :]
    return means, 0.5 * apart.mT @ apart
