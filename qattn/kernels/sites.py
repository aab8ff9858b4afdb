"""Where a kernel of points is, prepared once for all bandwidths: centred, and sorted into tiles."""

from functools import cached_property

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.kernels.tiles import SortedCloud
from qattn.ranks import ALONE, Ranks
from qattn.tiling import kd_order

__all__ = ["Sites", "scaled"]


def scaled(points: Tensor, sigma: Tensor) -> Tensor:
    """x / σ, with a head axis if σ has one."""
    if sigma.ndim == 0:
        return points / sigma
    return points[..., None, :, :] / sigma[:, None, None]  # (*batch, H, N, d)


def _flat(x: Tensor, axes: int) -> Tensor:
    """One batch axis before the last axes; also of a shard without points."""
    return x.reshape(x.shape[:-axes].numel(), *x.shape[-axes:])


class Sites:
    """Targets and the points that they attend to.

    Args:
        targets: Positions (*batch, N, d).
        points: Positions (*batch, M, d); the same object as the targets for a cloud and itself.
        origin: What is to be the origin, (*batch, 1, d); the mean of the points by default.
        ranks: Who holds them all.
    """

    def __init__(self, targets: Tensor, points: Tensor, origin: Tensor | None = None, ranks: Ranks = ALONE) -> None:
        self._is_self, self._origin, self.ranks = targets is points, origin, ranks
        self._given = targets.detach(), points.detach()
        self.batch = broadcast_shapes(targets.shape[:-2], points.shape[:-2])
        self.size = targets.shape[-2], points.shape[-2]  # N and M
        self.dims, self.dtype, self.device = points.shape[-1], points.dtype, points.device

    @cached_property
    def clouds(self) -> tuple[Tensor, Tensor]:
        """Targets (*batch, N, d) and points (*batch, M, d) about the origin; one object for the same."""
        targets, points = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in self._given)
        origin = points.mean(-2, keepdim=True) if self._origin is None else self._origin.to(points)
        points = (points - origin).expand(*self.batch, -1, -1)
        return points if self._is_self else (targets - origin).expand(*self.batch, -1, -1), points

    @cached_property
    def extent(self) -> Tensor:
        """The sides of the box about all clouds, of all ranks, (d,)."""
        low, high = self.ranks.box(torch.cat([x.reshape(-1, x.shape[-1]) for x in self.clouds]))
        return (high - low).double()

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """The orders of the targets and of the points, (*batch, N) and (*batch, M)."""

        def order(x: Tensor) -> Tensor:
            return kd_order(_flat(x, 2).cpu()).reshape(x.shape[:-1])

        targets, points = self.clouds
        last = order(points)
        return last if self._is_self else order(targets), last

    def scaled(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and points by σ, flattened to (B, N, d) and (B, M, d)."""
        targets, points = self.clouds
        points = _flat(scaled(points, sigma), 2)
        return points if self._is_self else _flat(scaled(targets, sigma), 2), points

    def sorted(self, sigma: Tensor) -> tuple[SortedCloud, SortedCloud]:
        """Targets and points by σ, in tiles."""

        def cloud(points: Tensor, order: Tensor) -> SortedCloud:
            if sigma.ndim:
                order = order[..., None, :].expand(*self.batch, len(sigma), -1)
            return SortedCloud(points, _flat(order, 1))

        targets, points = self.scaled(sigma)
        last = cloud(points, self._orders[1])
        return last if self._is_self else cloud(targets, self._orders[0]), last
