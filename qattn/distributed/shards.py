"""Where a sharded cloud is: how many points each rank has, about one origin, prepared once for all bandwidths."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn.distributed.group import Group
from qattn.kernels.sites import Sites

__all__ = ["Shards", "as_dtensor", "gather", "shard"]


class Shards:
    """This rank's targets and points among those of all ranks.

    Args:
        group: The ranks.
        targets: Positions (*batch, n, d), as many as this rank has.
        points: Positions (*batch, m, d); the same object as the targets for a cloud and itself.
    """

    def __init__(self, group: Group, targets: Tensor, points: Tensor) -> None:
        self.group = group
        batch = torch.broadcast_shapes(targets.shape[:-2], points.shape[:-2])
        about = [*points.shape[-1:], points.dtype.itemsize, *batch]
        header = torch.tensor([targets.shape[-2], points.shape[-2], len(about), *about], device=points.device)
        headers = [row.tolist() for row in group.joined(header)]
        _checks.same_on_all_ranks("The dimension, the bytes a number and the batch", [row[3:] for row in headers])
        self.queries, self.keys = ([int(row[n]) for row in headers] for n in (0, 1))
        self.total = sum(self.keys)
        if self.total == 0:
            raise ValueError("`points` should hold at least one point on some rank; all shards are empty.")
        sums = group.sum(points.detach().double().sum(-2, keepdim=True))
        self.origin = sums / self.total  # (*batch, 1, d)
        self.is_self = targets is points
        self.sites = Sites(targets, points, self.origin, group)


def shard(points: Tensor, group: object = None) -> Tensor:
    """The numbers (n,) of those points (N, d) that this rank should take, of a cloud that all ranks can read.

    The cloud is halved along its longest side until there is a part for each rank. Parts are of equal size, and
    compact, so that few points of one are near another. Any other way to share a cloud out is as right, and merely
    exchanges more. What belongs to the points follows by `mass[index]`, also from a file that is mapped to memory.

    Args:
        points: Positions of shape (N, d), the same on all ranks.
        group: A process group; None for that of all processes.
    """
    ranks, x = Group(group), _checks.points("points", points).detach().cpu().numpy()
    index, first, last = np.arange(len(x)), 0, ranks.size  # of the ranks that the numbers are for
    while last - first > 1:
        middle = (first + last) // 2
        count = len(index) * (middle - first) // (last - first)
        if 0 < count < len(index):
            side = x[index].max(0) - x[index].min(0)
            index = index[np.argpartition(x[index, side.argmax()], count)]
        index, first, last = (index[:count], first, middle) if ranks.rank < middle else (index[count:], middle, last)
    return torch.from_numpy(np.sort(index)).to(points.device)


def gather(x: Tensor, index: Tensor, group: object = None) -> Tensor:
    """What the ranks have of a cloud, (n, …) each, as a whole (N, …) on all of them, in the order that `shard` left.

    Args:
        x: What this rank has, one row a point.
        index: The numbers (n,) of its points, from `shard`.
        group: A process group; None for that of all processes.
    """
    ranks = Group(group)
    rows, numbers = torch.cat(ranks.joined(x)), torch.cat(ranks.joined(index))
    return torch.empty_like(rows).index_copy_(0, numbers, rows)


def as_dtensor(x: Tensor, like: Any) -> Any:
    """A DTensor of the values x that this rank has, (n,) or (*batch, n, C), sharded as another is: `like`."""
    from torch.distributed.tensor import DTensor, Shard  # here, because importing it takes a while

    axis = max(0, x.ndim - 2)
    N = like.shape[max(0, like.ndim - 2)]
    whole = torch.empty(*x.shape[:axis], N, *x.shape[axis + 1 :], device="meta")
    return DTensor.from_local(
        x, like.device_mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
