r"""The effective bandwidth of a diffusion, measured from its operator instead of taken from its kernel.

On a d-dimensional shape of any form, the Dirichlet energy of the coordinates is known: ∫ Σ_a |∇x_a|² = d ∫ 1. The
energy that the operator gives them therefore measures how far it spreads, by the s for which Q ≈ exp(−s²L/2):

    s² = (2/d) Σ_i m_i u_i · (−log Q u)_i / Σ_i m_i,        −log Q = (I − Q) + (I − Q)²/2 + (I − Q)³/3 + …

Three things make s differ from σ. Each of N random points counts itself twice, as one of the points and as the center,
so that Q ≈ (1 − ε) Q′ + ε I. Boundaries and masses change the width of rows. And random points conduct like a random
medium, more slowly than the mean of their steps. Eigenvectors follow the medium: their values change little between
points that are tightly connected. So do the u: points x that move within their tangent planes, by some steps that
reduce the energy at short range. The normal directions are left alone, because moves along them would smooth the shape.

If rows reach across the shape, or across a narrow part of it in all places, its coordinates are themselves at short
range. The steps then take them away, and what is left of the energy tells nothing.
"""

import math

import torch
from torch import Tensor

from qattn import _checks
from qattn.kernels import GaussianKernel, OrientedKernel
from qattn.operators.diffusion import Diffusion

__all__ = ["effective_sigma", "measured_sigma"]

_MIN_RATIO = 0.25  # of the widths of rows along a tangent direction and along the widest one
_NUM_STEPS, _SHORT_RANGE = 4, 0.1  # of the relaxation, Chebyshev's for the modes with (1 − λ)² above this
_LEAST = 1e-3  # part of σ² that can be measured: with less, a row is its own point
# Part of the coordinates that must be left, in each direction. With less, σ itself was nearer to the truth on random
# circles, parabolas, squares, spheres, cubes and balls of 10 to 320 points.
_LEFT = 0.85


@torch.no_grad()
def effective_sigma(q: Diffusion, dims: int | None = None) -> float:
    r"""Measure s with Q ≈ exp(−s²L/2), by the energy of the coordinates of the points, in twelve passes.

    Args:
        q: Operator of one cloud with a Gaussian kernel, with or without normals, and one bandwidth, normalized by
            "sinkhorn" or "row".
        dims: Dimension d of the shape: 1 for curves, 2 for surfaces, 3 for volumes. By default the mean number of
            directions in which rows are wide, rounded.

    Returns:
        The bandwidth s. It is σ if there is nothing to measure: no row reaches another point, or rows reach across the
        shape, as with a few points.

    Examples:
        >>> points = torch.nn.functional.normalize(torch.randn(2000, 3), dim=-1)
        >>> 0.09 < effective_sigma(diffusion(points, 0.1)) < 0.1  # each point counts itself twice
        True
    """
    kernel = q.kernel
    is_known = isinstance(kernel, GaussianKernel | OrientedKernel)
    if not is_known or len(q.shape) > 2 or q.normalization not in ("sinkhorn", "row"):
        raise ValueError(
            "`effective_sigma` needs one cloud with a `GaussianKernel` or an `OrientedKernel`, one bandwidth, and "
            f'`normalization="sinkhorn"` or "row"; got {type(kernel).__name__} of shape {tuple(q.shape)} and '
            f'"{q.normalization}". Take one item first, as in `effective_sigma(q[0])`.'
        )
    assert isinstance(kernel, GaussianKernel | OrientedKernel)
    if dims is not None:
        dims = min(_checks.integer("dims", dims, 1), kernel.points.shape[-1])
    measured = measured_sigma(q, kernel, dims)
    return float(kernel.sigma) if measured is None else measured


@torch.no_grad()
def measured_sigma(q: Diffusion, kernel: GaussianKernel | OrientedKernel, dims: int | None) -> float | None:
    """Measure s as `effective_sigma`, for the kernel of the operator; None if there is nothing to measure."""
    mean = _RowMeans(q)
    points = mean.centered(kernel.points.to(kernel.dtype))
    widths, directions = mean.widths(points)
    if dims is None:
        num_wide = (widths > _MIN_RATIO * widths[:, -1:]).sum(-1)
        dims = max(1, round(float(mean.over_sites(num_wide))))
    tangents = directions[..., -dims:]
    tangents = (tangents @ tangents.mT).to(points)  # (N, D, D), projections to tangent spaces
    u = _relaxed(points, tangents, mean)
    square = 2 / dims * float(_log_energy(u, mean))
    if square < _LEAST * float(kernel.sigma) ** 2 or _part_left(u, points, mean) < _LEFT:
        return None
    return math.sqrt(square)


class _RowMeans:
    """Means over the rows of Q, each divided by its sum: an operator that keeps constants, however Q has converged.

    It is self-adjoint for the weights w_i = m_i Σ_j Q_ij.
    """

    def __init__(self, q: Diffusion) -> None:
        self._kernel, self._bias = q.kernel, q.bias
        lse = q.kernel.attend(q.bias).lse
        log_weight = torch.where(q.bias > -torch.inf, q.bias + lse, -torch.inf).double()
        self._weight = torch.exp(log_weight - q.kernel.ranks.log_sum(torch.logsumexp(log_weight, -1)))  # (N,), sum 1

    def over_sites(self, x: Tensor) -> Tensor:
        """Compute Σ_i w_i x_i of x (N, …)."""
        axes = "n,nc->c" if x.ndim == 2 else "n,n->"
        return self._kernel.ranks.sum(torch.einsum(axes, self._weight, x.double()))

    def centered(self, x: Tensor) -> Tensor:
        """Subtract the mean of x (N, C), and set it to 0 at sites without mass."""
        return torch.where(self._weight[:, None] > 0, x - self.over_sites(x).to(x), 0)

    def residual(self, x: Tensor) -> Tensor:
        """Compute (I − Q) x for x (N, C)."""
        mean = self._kernel.attend(self._bias, x).out
        assert mean is not None
        return torch.where(self._weight[:, None] > 0, x - mean.to(x.dtype), 0)

    def widths(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return variances (N, D) of the rows, ascending, and their principal directions (N, D, D), in float64."""
        x = points.double()  # variances are small differences of squares
        squares = (x[:, :, None] * x[:, None, :]).flatten(1)
        moments = torch.cat([x, squares], dim=1)
        first, second = (moments - self.residual(moments)).split([x.shape[1], squares.shape[1]], dim=1)
        covariances = second.unflatten(1, x.shape[1:] * 2) - first[:, :, None] * first[:, None, :]
        return torch.linalg.eigh(0.5 * (covariances + covariances.mT))


def _relaxed(points: Tensor, tangents: Tensor, mean: _RowMeans) -> Tensor:
    """Move points in their tangent planes to reduce their energy at short range: u ← u − ω P (I − Q) P (I − Q) u."""
    u, low = points, _SHORT_RANGE
    for n in range(_NUM_STEPS):
        node = 0.5 * (1 + low) + 0.5 * (1 - low) * math.cos(math.pi * (2 * n + 1) / (2 * _NUM_STEPS))
        force = _projected(tangents, mean.residual(u))
        u = u - _projected(tangents, mean.residual(force)) / node
    return u


def _part_left(u: Tensor, points: Tensor, mean: _RowMeans) -> float:
    """Compute the least Σ_i w_i (a · u_i)(a · x_i) / Σ_i w_i (a · x_i)² over directions a in which x is extended."""
    products, squares = (
        mean.over_sites((x[:, :, None] * points[:, None, :]).flatten(1)).view(2 * points.shape[1:]) for x in (u, points)
    )
    variances, axes = torch.linalg.eigh(squares)
    axes = (axes / variances.sqrt())[:, variances > torch.finfo(points.dtype).eps * variances[-1]]
    return float(torch.linalg.eigvalsh(axes.mT @ (products + products.mT) @ axes)[0] / 2) if axes.numel() else 0.0


def _projected(tangents: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("nab,nb->na", tangents, x)


def _log_energy(u: Tensor, mean: _RowMeans) -> Tensor:
    """Compute Σ_i w_i u_i · (−log Q u)_i, by four terms of the series."""
    first = mean.residual(u)
    second = mean.residual(first)
    terms = u * first + first * first / 2 + first * second / 3 + second * second / 4
    return mean.over_sites(terms.sum(-1))
