r"""Geodesics of shapes: Hamiltonian shooting with the diffusion Q_q of their points as a metric, or with the kernel K_q.

    H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j,        q̇ = ∂H/∂p = Q_q p,        ṗ = −∂H/∂q,

the geodesic equations of LDDMM (section 5 and appendix I of the paper), with equal masses. A normalisation that changes
with q adds its adjoint u, which one linear system gives:

    ṗ_i = Σ_j Q_q[i, j] (p_i · p_j − u_i − u_j) (q_i − q_j) / σ²,        (I + Q_q) u = (p_i · q̇_i)_i,

and K_q has no u. These are forces between pairs, along the lines that join them, opposite to one another: whatever the
tolerances, they keep momentum and angular momentum. A step is a few passes of the kernel; matching differentiates it.

With K_q, points that come together move for almost nothing, so geodesics contract on the way, and blow up beyond its
end. The spectrum of Q_q stays in [0, 1], and a translation costs the same wherever points are.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qattn import _checks
from qattn._progress import Progress
from qattn.operators import Diffusion, diffusion
from qattn.solver import log_of_mass, solve

__all__ = ["Geodesic", "Hamiltonian", "shoot"]

METRICS = ("diffusion", "kernel")
INTEGRATORS = ("euler", "midpoint")


class Hamiltonian:
    r"""H(q, p) = ½ Σ_ij Q_q[i, j] p_i · p_j for positions q and momenta p of shape (N, d).

    Args:
        sigma: The bandwidth of the Gaussian kernel.
        metric: "diffusion" for Q_q with equal masses, "kernel" for K_q itself.
        tol: The mean of |Q1 − 1| at which normalising stops.

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
        velocity = operator @ momenta
        a = b = momenta
        if self.metric == "diffusion":
            kernel, f, log_mass = operator.kernel, operator.potential, log_of_mass(operator.mass)
            u = solve(kernel, f, log_mass, (momenta * velocity).sum(-1), False, kernel.tensors)[:, None]
            one = torch.ones_like(u)
            a, b = torch.cat([momenta, -u, one], dim=-1), torch.cat([momenta, one, -u], dim=-1)
        # With p_i · p_j − u_i − u_j = a_i · b_j, the force is that of Σ_j Q_ij (a_i · b_j) (x_i − x_j).
        x = operator.kernel.centred  # (N, d)
        values = torch.cat([b[..., None], b[..., None] * x[:, None]], dim=-1)  # (N, n, 1 + d)
        means = (a[..., None] * (operator @ values.flatten(1)).unflatten(1, values.shape[1:])).sum(1)  # (N, 1 + d)
        return velocity, (means[:, :1] * x - means[:, 1:]) / self.sigma**2


@dataclass(frozen=True)
class Geodesic:
    """A path of shapes.

    Attributes:
        times: When, shape (T,).
        positions: Where the points are, shape (T, N, d).
        momenta: Their momenta, shape (T, N, d).
    """

    times: Tensor
    positions: Tensor
    momenta: Tensor


def shoot(
    hamiltonian: Hamiltonian,
    positions: Tensor,
    momenta: Tensor,
    *,
    until: float = 1.0,
    dt: float = 0.1,
    integrator: str = "euler",
) -> Geodesic:
    q, p, f = positions, momenta, None
    count = math.ceil(abs(until) / dt - 1e-6)
    step = until / max(1, count)
    path = [(q, p)]
    with Progress("Shooting", count) as progress:
        for _ in range(count):
            operator = hamiltonian.operator(q, f)
            dq, dp = hamiltonian.derivatives(operator, p)
            f = operator.potential
            q, p = q + step * dq, p + step * dp
            path.append((q, p))
            progress.advance()
    times = torch.linspace(0, until, count + 1, dtype=positions.dtype)
    return Geodesic(times, torch.stack([q for q, _ in path]), torch.stack([p for _, p in path]))
