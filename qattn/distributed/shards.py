"""Where a sharded cloud is: which points each rank has, about one origin, prepared once for all bandwidths."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn.distributed.group import Group, pack, unpack
from qattn.kernels.sites import Sites

__all__ = ["Shards", "as_dtensor", "compact", "gather", "shard"]

_SAMPLE = 2**14  # points of the largest shard that decide where a cloud is cut


class Shards:
    """This rank's targets and points among those of all ranks.

    Args:
        group: The ranks.
        targets: Positions (*batch, n, d), as many as this rank has.
        points: Positions (*batch, m, d); the same object as the targets for a cloud and itself.
    """

    def __init__(self, group: Group, targets: Tensor, points: Tensor) -> None:
        self.group = group
        lengths = group.gathered(torch.tensor([targets.shape[-2], points.shape[-2]], device=points.device))
        self.queries, self.keys = ([int(row[n]) for row in lengths] for n in (0, 1))
        self.total = sum(self.keys)
        if self.total == 0:
            raise ValueError("`points` should hold at least one point on some rank; all shards are empty.")
        sums = group.sum(points.detach().double().sum(-2, keepdim=True))
        self.origin = sums / self.total  # (*batch, 1, d)
        self.is_self = targets is points
        centered = points.detach() - self.origin.to(points)  # differences of them are right, wherever the cloud is
        self.sites = Sites(centered if self.is_self else targets.detach() - self.origin.to(points), centered, group)


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


def compact(points: Tensor, *others: Tensor, group: object = None) -> tuple[Tensor, ...]:
    """Exchanges the points of a cloud that no rank can hold alone, so that each has a compact part of it.

    The cloud is halved along its longest side, where a sample of it says, until there is a part for each rank; parts
    are of about equal size. If all ranks can read the cloud, `shard` tells them what to read, and nothing is exchanged.

    Args:
        points: The positions (n, d) that this rank happens to have, such as a part of a file; n may differ, and be 0.
        *others: What belongs to them, (n,) or (n, C): masses, signals, labels.
        group: A process group; None for that of all processes.

    Returns:
        The numbers (n',) of the points that this rank now has, counted over the ranks in order; their positions; and
        what belongs to them.
    """
    ranks, x = Group(group), _checks.points("points", points, least=0).detach()
    rows = [x, *(_checks.rows_of("others", other, x) for other in others)]
    lengths = [int(n) for n in ranks.gathered(torch.tensor([len(x)], device=x.device))]
    numbers = sum(lengths[: ranks.rank]) + torch.arange(len(x), device=x.device)
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:: -(-max(lengths) // _SAMPLE) or 1]
    owner = _owners(x, torch.cat(ranks.joined(x[drawn.to(x.device)])), 0, ranks.size)

    columns = [column if column.ndim == 2 else column[:, None] for column in (numbers, *rows)]
    packed = pack(*columns)[torch.argsort(owner, stable=True)]
    counts = torch.stack(ranks.gathered(torch.bincount(owner, minlength=ranks.size)))  # (from, to)
    outgoing = dict(enumerate(packed.split(counts[ranks.rank].tolist())))
    kept = outgoing.pop(ranks.rank)
    incoming = {r: packed.new_empty(int(counts[r, ranks.rank]), packed.shape[1]) for r in outgoing}
    ranks.end_exchange(ranks.begin_exchange(outgoing, incoming))
    parts = incoming | {ranks.rank: kept}
    found = unpack(
        torch.cat([parts[r] for r in range(ranks.size)]), [c.shape[1] for c in columns], [c.dtype for c in columns]
    )
    return tuple(y if given.ndim == 2 else y[:, 0] for y, given in zip(found, (numbers, *rows), strict=True))


def _owners(points: Tensor, sample: Tensor, first: int, last: int) -> Tensor:
    """To which of the ranks from `first` to before `last` points (n, d) go, shape (n,), in halves of the sample."""
    if last - first == 1 or len(sample) == 0:
        return torch.full((len(points),), first, device=points.device)
    middle = (first + last) // 2
    side = int((sample.amax(0) - sample.amin(0)).argmax())
    cut = sample[:, side].sort().values[len(sample) * (middle - first) // (last - first)]
    owner = torch.empty(len(points), dtype=torch.long, device=points.device)
    for is_low, ends in ((True, (first, middle)), (False, (middle, last))):
        here, there = ((x[:, side] < cut) == is_low for x in (points, sample))
        owner[here] = _owners(points[here], sample[there], *ends)
    return owner


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
