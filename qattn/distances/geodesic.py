r"""Geodesic distance along a cloud: the rate at which heat decays with the distance from its source.

A walker steps with the weights of Q and dies with probability 1 − e^{−κ²/2} per step. The heat u of all walkers from a
source solves u = e^{−κ²/2} Q u away from it, and decays as

    log u(x) = −κ d(x) / σ + c(x) + O(1/κ),   so that   d ≈ σ (log u_κ − log u_κ') / (κ' − κ)

with two rates κ < κ'. The difference removes c, which holds the curvature of the shape and the dimension. This is the
heat method of Crane et al. (2013) with Q in place of its solve, and with a difference of two solutions in place of
normalized gradients and their integration.

The solution is that of log u ← f + lse(f + log m + log u) − κ²/2: attention with a bias. Logarithms do not underflow,
however far the source is, and nothing of a mesh is needed. Heat moves by about κσ in every pass, so that only points
near its front are computed again, as in fast marching.
"""

import math

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn._types import ArrayLike, TensorOrArray
from qattn.distances.neighbors import nearest_neighbors
from qattn.kernels import GaussianKernel
from qattn.operators.diffusion import Diffusion

__all__ = ["geodesic_distance"]

_RATES = 2.0, 3.0  # κ < κ': steps of about κ bandwidths, and errors of about 1/κ² bandwidths
_NEAR = 3.0  # bandwidths from a source within which a path is straight, because one step reaches it
_GAP = 5.0  # bandwidths that no step along a shape takes
_SHARE = 0.25  # of the heat of a point that comes from behind a gap, if the point lies there too
_TOL = 1e-3  # of the length of a step: change per pass at which the iteration stops
_REACH = 7.0  # bandwidths beyond which a change of heat is not felt in a pass: e^{κr − r²/2} is 3e-4 of its maximum


@eager
@torch.no_grad()
def geodesic_distance(q: Diffusion, sources: ArrayLike) -> TensorOrArray:
    r"""Compute the distance along a cloud from every point to the nearest source.

    The shape is what Q sees: parts that are less than about 5σ apart count as connected, and a path may cut corners of
    size σ. Take σ as small as the sampling allows, 3 to 4 mean distances between nearest neighbors.

    Args:
        q: Operator of one cloud (N, d) with a Gaussian kernel and one bandwidth σ, normalized by "sinkhorn" or "row".
        sources: Indices of points: one integer, several of shape (S,), or C sets of several of shape (C, S).

    Returns:
        Distances of shape (N,), or (N, C) for C sets, an array if the operator was made from one. They are ∞ at points
        that no path reaches whose steps are shorter than 5σ.

    Examples:
        >>> line = torch.linspace(0, 1, 101)[:, None]
        >>> d = geodesic_distance(diffusion(line, sigma=0.02), 0)
        >>> bool((d - line[:, 0]).abs().max() < 0.01)
        True
    """
    kernel = _checked_kernel(q)
    sets = _checked_sources(sources, kernel.shape[-1])
    # Errors of "fourier" are relative to the largest sum, not to that of each row. "auto" would compare in every pass.
    kernel = kernel.with_method("exact" if kernel.method == "exact" else "tiles")
    x = kernel.points.to(kernel.dtype)
    cells = _Cells(x, _REACH * float(kernel.sigma))
    columns = [
        _distance(q, kernel, x, cells, indices) for indices in sets.reshape(-1, sets.shape[-1] if sets.ndim else 1)
    ]
    distance = torch.stack(columns, dim=-1) if sets.ndim == 2 else columns[0]
    return distance if isinstance(q.mass, Tensor) else distance.numpy(force=True)


class _Cells:
    """Points (N, d) in cubes of a size, and which cubes touch."""

    def __init__(self, x: Tensor, size: float) -> None:
        from scipy.spatial import cKDTree  # here, because SciPy is slow to import

        cubes, self._cube_of = torch.unique((x.double() / size).floor().cpu(), dim=0, return_inverse=True)
        touching = cKDTree(cubes.numpy()).query_pairs(1.0, p=math.inf, output_type="ndarray")
        self._touching = torch.from_numpy(touching).long()  # (E, 2)
        self._num_cubes = len(cubes)

    def around(self, mask: Tensor) -> Tensor:
        """Return the indices of all points in cubes that hold a point of a mask (N,), or touch one that does."""
        is_hit = torch.zeros(self._num_cubes, dtype=torch.bool)
        is_hit[self._cube_of[mask.cpu()]] = True
        is_near = is_hit.clone()
        for here, there in (self._touching.T, self._touching.flip(1).T):
            is_near[there[is_hit[here]]] = True
        return is_near[self._cube_of].nonzero()[:, 0].to(mask.device)


def _distance(q: Diffusion, kernel: GaussianKernel, x: Tensor, cells: _Cells, sources: Tensor) -> Tensor:
    """Return the distances (N,) from sources (S,)."""
    nearest = x[sources][nearest_neighbors(x, x[sources])]  # (N, d)
    straight = (x - nearest).norm(dim=-1)
    slow, fast = (_log_heat(q, kernel, x, cells, straight, rate) for rate in _RATES)
    is_reached = fast > -torch.inf
    distance = torch.where(is_reached, kernel.sigma * (slow - fast) / (_RATES[1] - _RATES[0]), torch.inf)
    distance = torch.maximum(distance, straight)  # no path is shorter
    # Along a path log u is −κd/σ. Over a gap g it falls by g²/2σ², below all that rounding leaves of a path.
    is_cold = -fast > 2 * _RATES[1] * (distance / kernel.sigma + _NEAR)
    return torch.where(is_cold | _is_behind_gap(q, kernel, x, straight, fast), torch.inf, distance)


def _log_heat(q: Diffusion, kernel: GaussianKernel, x: Tensor, cells: _Cells, straight: Tensor, rate: float) -> Tensor:
    """Solve log u = f + lse(f + log m + log u) − κ²/2 away from sources, from distances `straight` (N,) to them.

    Near the sources log u is −κ/σ times the distance, and where no heat arrives −∞.
    """
    sigma, bias, f = kernel.sigma, q.bias, torch.as_tensor(q.potential)
    near = straight <= _NEAR * sigma
    log_u = torch.where(near, -rate * straight / sigma, -torch.inf)
    rounding = 8 * torch.finfo(log_u.dtype).eps
    has_changed = near
    with Progress("Distance") as progress:
        while has_changed.any():
            rows = cells.around(has_changed)
            rows = rows[~near[rows]]
            new, old = f[rows] + kernel.at(x[rows]).attend(bias + log_u).lse - rate**2 / 2, log_u[rows]
            change = torch.where(new == old, 0, new - old).abs()
            has_changed = torch.zeros_like(near)
            has_changed[rows] = change > _TOL * rate**2 + rounding * new.abs()
            log_u[rows] = new
            progress.advance(change=change)
    return log_u


def _is_behind_gap(q: Diffusion, kernel: GaussianKernel, x: Tensor, straight: Tensor, log_u: Tensor) -> Tensor:
    """Return a mask (N,) of the points that heat reaches only by steps longer than those along a shape."""
    rows = ((straight > _NEAR * kernel.sigma) & (log_u > -torch.inf)).nonzero()[:, 0]
    behind = torch.zeros_like(straight, dtype=torch.bool)
    to_rows = kernel.at(x[rows])
    origin = to_rows.attend(q.bias + log_u, x).out  # (n, d), the mean of where heat comes from
    assert origin is not None
    behind[rows] = (origin - x[rows]).norm(dim=-1) > _GAP * kernel.sigma
    while behind.any():  # from point to point, as the heat goes
        share = to_rows.attend(q.bias + log_u, behind[:, None].to(x.dtype)).out
        assert share is not None
        new = behind.clone()
        new[rows] |= share[:, 0] > _SHARE
        if (new == behind).all():
            break
        behind = new
    return behind


def _checked_kernel(q: Diffusion) -> GaussianKernel:
    kernel = q.kernel
    if not isinstance(kernel, GaussianKernel) or q.normalization not in ("sinkhorn", "row"):
        raise ValueError(
            '`geodesic_distance` needs a `GaussianKernel` and `normalization="sinkhorn"` or "row"; '
            f'got {type(kernel).__name__} and "{q.normalization}".'
        )
    kernel.ranks.check_alone("geodesic_distance")
    _checks.one_item("geodesic_distance", q.shape, "geodesic_distance(q[0], sources)")
    return kernel


def _checked_sources(sources: ArrayLike, num_points: int) -> Tensor:
    """Convert sources to integers, a scalar or of shape (S,) or (C, S)."""
    indices = _checks.integers("sources", sources, "indices of points")
    if indices.ndim > 2 or indices.numel() == 0:
        raise ValueError(
            "`sources` should be one index, or of shape (S,) or (C, S) with at least one source per set; "
            f"got {_checks.shape_of(indices)}."
        )
    smallest, largest = (int(end) for end in indices.aminmax())
    if smallest < 0 or largest >= num_points:
        raise ValueError(
            f"`sources` should number points from 0 to {num_points - 1}; got numbers from {smallest} to {largest}."
        )
    return indices
