"""Points of a Gaussian kernel, prepared once for all bandwidths: sorted into tiles, relative to a common origin."""

import copy
from functools import cached_property

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.kernels.gaussian.tiles import SortedCloud
from qattn.ranks import Ranks
from qattn.tiles.order import kd_order

__all__ = ["PreparedPoints", "with_heads"]


def with_heads(x: Tensor, sigma: Tensor) -> Tensor:
    """Expand points (*batch, N, d) to one copy per head, (*batch, H, N, d), if σ has shape (H,)."""
    return x[..., None, :, :].expand(*x.shape[:-2], len(sigma), -1, -1) if sigma.ndim else x


def _flat(x: Tensor, axes: int) -> Tensor:
    """Flatten all but the last `axes` axes to one, also without points."""
    return x.reshape(x.shape[:-axes].numel(), *x.shape[-axes:])


class PreparedPoints:
    """Targets, and the points that they attend to.

    Args:
        targets: Positions (*batch, N, d).
        points: Positions (*batch, M, d); the same object as the targets if a cloud attends to itself.
        ranks: Process group over which they are sharded.

    Attributes:
        queries: Number of targets per rank.
        keys: Number of points per rank.
        origin: Mean of the points of all ranks, (*batch, 1, d), the origin of all shards; None for local points.
    """

    def __init__(self, targets: Tensor, points: Tensor, ranks: Ranks) -> None:
        self.is_self, self.ranks = targets is points, ranks
        self._ordered_like: PreparedPoints | None = None
        self._targets, self._points = targets.detach(), points.detach()
        self.batch = broadcast_shapes(targets.shape[:-2], points.shape[:-2])
        self.dims, self.dtype, self.device = points.shape[-1], points.dtype, points.device
        self.queries, self.keys, self.origin = [targets.shape[-2]], [points.shape[-2]], None
        if not ranks.is_alone:
            sizes = ranks.joined(torch.tensor([[targets.shape[-2], points.shape[-2]]], device=points.device))
            self.queries, self.keys = ([int(row[0, n]) for row in sizes] for n in (0, 1))
            if sum(self.keys) == 0:
                raise ValueError("`points` should hold at least one point on some rank; all shards are empty.")
            self.origin = ranks.sum(self._points.double().sum(-2, keepdim=True)) / sum(self.keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers N and M of the targets and points of this rank."""
        return self._targets.shape[-2], self._points.shape[-2]

    def located(self, x: Tensor) -> Tensor:
        """Shift positions to the origin that all ranks share; local points are not shifted."""
        return x if self.origin is None else x - self.origin.to(x)

    def ordered_like(self, other: "PreparedPoints") -> "PreparedPoints":
        """Return the same points, to be sorted in the order of others, whose batch (*batch,) may lack axes.

        Args:
            other: The same number of points that attend to themselves, such as positions without further coordinates.
        """
        result = copy.copy(self)
        for name in ("_orders", "_sorted"):
            result.__dict__.pop(name, None)
        result._ordered_like = (
            other._ordered_like or other
        )  # refer to the original, so that no chain of kernels is kept alive
        return result

    @cached_property
    def clouds(self) -> tuple[Tensor, Tensor]:
        """Targets (*batch, N, d) and points (*batch, M, d), in float32 or float64; one object if they are the same."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        points = self.located(self._points).to(dtype).expand(*self.batch, -1, -1)
        return points if self.is_self else self.located(self._targets).to(dtype).expand(*self.batch, -1, -1), points

    @cached_property
    def extent(self) -> Tensor:
        """Sides (d,) of a box into which each cloud fits, over all ranks."""
        points = self.clouds[1] if self.is_self else torch.cat(self.clouds, dim=-2)  # (*batch, N + M, d)
        if self.ranks.is_alone and self.batch.numel() > 1:  # the clouds of a batch may be far apart
            points = points - points[..., :1, :]
        low, high = self.ranks.box(points.reshape(-1, self.dims))
        return (high - low).double()

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """Orders of the targets and of the points, (*batch, N) and (*batch, M)."""
        if self._ordered_like is not None:
            order = self._ordered_like._orders[1]
            missing = (1,) * (len(self.batch) + 1 - order.ndim)  # heads, and nothing else
            order = order.reshape(*order.shape[:-1], *missing, order.shape[-1]).expand(*self.batch, -1)
            return order, order
        targets, points = self.clouds
        of_points = kd_order(_flat(points, 2).cpu()).reshape(points.shape[:-1])
        return of_points if self.is_self else kd_order(_flat(targets, 2).cpu()).reshape(targets.shape[:-1]), of_points

    def flat(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets (B, N, d), points (B, M, d) and bandwidths (B,), for all heads."""
        targets, points = (with_heads(x, sigma) for x in self.clouds)
        bandwidths = sigma.expand((*self.batch, *sigma.shape)).reshape(-1)
        points = _flat(points, 2)
        return points if self.is_self else _flat(targets, 2), points, bandwidths

    @cached_property
    def _sorted(self) -> tuple[SortedCloud, SortedCloud]:
        return self._sorted_for(torch.ones((), device=self.device))

    def sorted(self, sigma: Tensor) -> tuple[SortedCloud, SortedCloud]:
        """Return sorted targets and points, for all heads."""
        return self._sorted_for(sigma) if sigma.ndim else self._sorted

    def _sorted_for(self, sigma: Tensor) -> tuple[SortedCloud, SortedCloud]:
        def cloud(points: Tensor, order: Tensor) -> SortedCloud:
            if sigma.ndim:
                order = order[..., None, :].expand(*self.batch, len(sigma), -1)
            return SortedCloud(points, _flat(order, 1))

        targets, points, _ = self.flat(sigma)
        keys = cloud(points, self._orders[1])
        return keys if self.is_self else cloud(targets, self._orders[0]), keys
