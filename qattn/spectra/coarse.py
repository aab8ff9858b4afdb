r"""Coarse levels of large clouds, whose eigenvectors start the iteration for all points.

The operator of the centers of neighboring points, with their total masses and a bandwidth that centers can resolve, has
nearly the same eigenvectors (Theorem 4.5 of the paper). One application extends them to all points. They only lack
rough components, which filters of low degree recover.
"""

import math

import torch
from torch import Tensor

from qattn.kernels import GaussianKernel, OrientedKernel
from qattn.operators.diffusion import Diffusion, diffusion
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.order import kd_order

__all__ = ["centers_of_mass", "coarse_operator"]

_GROUP = 8  # points per center
_MIN_SITES = 4000  # fewer are not worth a coarse level
_NEIGHBORS = 8.0  # row sum Σ_j K_ij of centers that the bandwidth should reach
_MIN_NEIGHBORS = 0.05  # row sum below which the bandwidth would have to exceed the size of modes
_SAMPLES = 256  # centers at which row sums are measured


def coarse_operator(kernel: GaussianKernel | OrientedKernel, mass: Tensor, num_columns: int) -> Diffusion | None:
    """Return the operator of a coarse level, or None if there are too few points or neighbors, or no compiled sort.

    Args:
        kernel: Kernel of the points. With normals, centers are of points on one side of a sheet.
        mass: Their masses, shape (N,).
        num_columns: Number of eigenvectors that the coarse level should have.
    """
    num_sites = int(kernel.ranks.sum((mass > 0).sum()))
    sigma = float(kernel.sigma.detach())
    if num_sites < max(_MIN_SITES, 4 * _GROUP * num_columns) or why_not_compiled():
        return None
    if isinstance(kernel, OrientedKernel) and not kernel.ranks.is_alone:
        return None
    sites = kernel.points.detach()
    if isinstance(kernel, OrientedKernel):
        sites = torch.cat([sites, sigma * kernel.normals.detach()], dim=-1)
    centers, masses = centers_of_mass(sites, mass)  # on each rank, those of its own points
    centers, normals = centers.tensor_split([kernel.points.shape[-1]], dim=-1)
    # Centers have fewer neighbors than points, by as much as they are fewer; a larger bandwidth compensates.
    samples = centers[:: max(1, len(centers) // _SAMPLES)]
    lse = kernel.at(samples).attend(torch.zeros(len(mass), dtype=kernel.dtype, device=mass.device)).lse
    neighbors = float(torch.exp(torch.cat(kernel.ranks.joined(lse))).median()) / _GROUP
    if neighbors < _MIN_NEIGHBORS:
        return None
    wide = sigma * max(1.0, math.sqrt(_NEIGHBORS / neighbors))
    if isinstance(kernel, GaussianKernel):
        return diffusion(kernel.like(centers, wide), mass=masses)
    weight = (normals / sigma).norm(dim=-1).clamp(max=1)
    return diffusion(OrientedKernel(centers, normals, wide, weight=weight), mass=masses)


def centers_of_mass(points: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return centers of mass (M, d) of groups of eight neighboring points (N, d), and the masses (M,) of the groups.

    Centers follow the density of the points, so that their modes differ from those of the points only in detail. A
    random sample has another density, and its modes differ everywhere.
    """
    present = (mass > 0).nonzero()[:, 0]
    order = present[kd_order(points[present].cpu()[None], leaf=_GROUP)[0].to(present.device)]
    groups = order[: len(order) // _GROUP * _GROUP].reshape(-1, _GROUP)
    masses = mass[groups]
    totals = masses.sum(1)
    return (masses[..., None] * points[groups]).sum(1) / totals[:, None], totals
