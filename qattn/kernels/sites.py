"""Where a kernel of points is, prepared once for all bandwidths: sorted into tiles."""

from functools import cached_property

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.kernels.tiles import SortedCloud
from qattn.ranks import ALONE, Ranks
from qattn.tiling import kd_order

__all__ = ["Sites", "with_heads"]


def with_heads(x: Tensor, sigma: Tensor) -> Tensor:
    """Points (*batch, N, d), with the same ones for each head, (*batch, H, N, d), if σ has an axis of them."""
    return x[..., None, :, :].expand(*x.shape[:-2], len(sigma), -1, -1) if sigma.ndim else x


def _flat(x: Tensor, axes: int) -> Tensor:
    """One batch axis before the last axes; also of a shard without points."""
    return x.reshape(x.shape[:-axes].numel(), *x.shape[-axes:])


class Sites:
    """Targets and the points that they attend to.

    Args:
        targets: Positions (*batch, N, d).
        points: Positions (*batch, M, d); the same object as the targets for a cloud and itself.
        ranks: Who holds them all.
    """

    def __init__(self, targets: Tensor, points: Tensor, ranks: Ranks = ALONE) -> None:
        self._is_self, self.ranks = targets is points, ranks
        self._given = targets.detach(), points.detach()
        self.batch = broadcast_shapes(targets.shape[:-2], points.shape[:-2])
        self.size = targets.shape[-2], points.shape[-2]  # N and M
        self.dims, self.dtype, self.device = points.shape[-1], points.dtype, points.device

    @cached_property
    def clouds(self) -> tuple[Tensor, Tensor]:
        """Targets (*batch, N, d) and points (*batch, M, d), in float32 or float64; one object for the same."""
        targets, points = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in self._given)
        points = points.expand(*self.batch, -1, -1)
        return points if self._is_self else targets.expand(*self.batch, -1, -1), points

    @cached_property
    def extent(self) -> Tensor:
        """The sides of a box that each cloud fits, of all ranks, (d,)."""
        points = torch.cat(self.clouds, dim=-2)  # (*batch, N + M, d)
        if self.ranks.is_alone:  # the clouds of a batch may be far from one another
            points = points - points[..., :1, :]
        low, high = self.ranks.box(points.reshape(-1, self.dims))
        return (high - low).double()

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """The orders of the targets and of the points, (*batch, N) and (*batch, M)."""

        def order(x: Tensor) -> Tensor:
            return kd_order(_flat(x, 2).cpu()).reshape(x.shape[:-1])

        targets, points = self.clouds
        last = order(points)
        return last if self._is_self else order(targets), last

    def flat(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Targets (B, N, d), points (B, M, d) and bandwidths (B,), for all heads."""
        targets, points = (with_heads(x, sigma) for x in self.clouds)
        bandwidths = sigma.expand((*self.batch, *sigma.shape)).reshape(-1)
        points = _flat(points, 2)
        return points if self._is_self else _flat(targets, 2), points, bandwidths

    def sorted(self, sigma: Tensor) -> tuple[SortedCloud, SortedCloud]:
        """Targets and points in tiles, for all heads."""

        def cloud(points: Tensor, order: Tensor) -> SortedCloud:
            if sigma.ndim:
                order = order[..., None, :].expand(*self.batch, len(sigma), -1)
            return SortedCloud(points, _flat(order, 1))

        targets, points, _ = self.flat(sigma)
        last = cloud(points, self._orders[1])
        return last if self._is_self else cloud(targets, self._orders[0]), last
