r"""Merging of points by mass: all points of a cell of a grid become one.

A cell that holds the points i has the mass M = Σ m_i, and the means (1/M) Σ m_i x_i of their positions and features. So
the measure stays the same, at a coarser resolution, and splitting a point into several of the same total mass changes
nothing. The grid is fixed in space: which points meet depends neither on their order nor on the rest of the cloud.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qattn._eager import eager

__all__ = ["Cells", "merged"]

_MAX_STEPS = 2.0**40  # cells along an axis; they are numbered by integers of 64 bits


@dataclass(frozen=True)
class Cells:
    """The cells of a batch of clouds that hold some mass, padded to one number with cells of mass 0.

    Attributes:
        points: Centers of mass (B, M, d). Padding repeats one of its cloud.
        mass: Masses (B, M).
        index: The cell of each point, (B, N); 0 for points without mass.
        share: The part of each point in the mass of its cell, (B, N); 0 for points without mass.
    """

    points: Tensor
    mass: Tensor
    index: Tensor
    share: Tensor

    def mean(self, x: Tensor) -> Tensor:
        """Average x (B, N, C) over the points of each cell, by mass: (B, M, C); 0 in the padding."""
        return _sums(x, self.share, self.index, self.mass.shape[1])

    def at_points(self, x: Tensor) -> Tensor:
        """Return the x (B, M, C) of the cell of each point, (B, N, C)."""
        return x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))


@eager
def merged(points: Tensor, mass: Tensor, edge: float) -> Cells:
    """Merge points (B, N, d) with masses (B, N), not all 0 in a cloud, by cells with a corner at the origin."""
    has_mass = mass > 0
    index, is_cell = _numbered(points.detach(), has_mass, edge)
    total = mass.new_zeros(is_cell.shape).scatter_add(1, index, torch.where(has_mass, mass, 0))
    share = torch.where(has_mass, mass / torch.where(has_mass, total.gather(1, index), 1), 0)
    centers = _sums(points, share, index, is_cell.shape[1])
    return Cells(torch.where(is_cell[..., None], centers, centers[:, :1]), total, index, share)


def _sums(x: Tensor, share: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum shares (B, N) times x (B, N, C) by an index (B, N), (B, count, C), ignoring x of share 0, such as NaN."""
    weighted = torch.where((share > 0)[..., None], x, 0) * share[..., None]
    rows = index + count * torch.arange(len(index), device=index.device)[:, None]
    sums = weighted.new_zeros(len(index) * count, x.shape[-1]).index_add(0, rows.flatten(), weighted.flatten(0, 1))
    return sums.unflatten(0, (len(index), count)).to(x.dtype)


def _numbered(points: Tensor, has_mass: Tensor, edge: float) -> tuple[Tensor, Tensor]:
    """Number the cells of each cloud of points (B, N, d), in the order of their coordinates.

    Returns:
        The cell (B, N) of each point, 0 for points without mass; and which of the numbers (B, M) are cells.
    """
    cloud = has_mass.nonzero()[:, 0]  # (T,)
    steps = torch.floor(points[has_mass].double() / edge)  # (T, d)
    steps = steps - steps.amin(0)
    if not bool((steps < _MAX_STEPS).all()):
        raise ValueError(
            "`spacing` should be a length in the unit of the points, about twice the distance of neighbors; points "
            f"extend over {float(steps.amax()):.1e} cells."
        )
    code = cloud
    for step in steps.long().T:  # numbered anew after each axis, so that codes stay small
        code = torch.unique(code * (step.amax() + 1) + step, return_inverse=True)[1]
    clouds = cloud.new_empty(int(code.amax()) + 1).scatter_(0, code, cloud)  # of the cells
    counts = torch.bincount(clouds, minlength=len(points))
    first = counts.cumsum(0) - counts
    index = torch.zeros(has_mass.shape, dtype=torch.long, device=points.device)
    index[has_mass] = code - first[cloud]
    return index, torch.arange(int(counts.amax()), device=points.device) < counts[:, None]
