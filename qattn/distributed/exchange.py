"""Partition of a cloud among ranks, and exchange of points and results between them."""

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike
from qattn.distributed.group import Group, GroupOrWorld, pack, unpack

__all__ = ["compact", "gather", "shard"]

_SAMPLE = 2**14  # points of the largest shard that determine where a cloud is cut


def shard(points: Tensor, group: GroupOrWorld = "world") -> Tensor:
    """Choose the points that this rank should hold, of a cloud that all ranks can read.

    The cloud is halved along its longest side until there is one part per rank. Parts have equal sizes and are compact,
    so that few points of one part are near another. Any other partition gives the same results, but exchanges more
    data. Masses and signals follow as `mass[index]`, also from a memory-mapped file.

    Args:
        points: Positions of shape (N, d), the same on all ranks.
        group: Process group, or "world" for all processes.

    Returns:
        Sorted indices (n,) of the points of this rank.
    """
    ranks, x = Group(group), _checks.points("points", points).detach().cpu().numpy()
    index, first, last = np.arange(len(x)), 0, ranks.size  # points of the ranks first … last − 1
    while last - first > 1:
        middle = (first + last) // 2
        count = len(index) * (middle - first) // (last - first)
        if 0 < count < len(index):
            side = x[index].max(0) - x[index].min(0)
            index = index[np.argpartition(x[index, side.argmax()], count)]
        index, first, last = (index[:count], first, middle) if ranks.rank < middle else (index[count:], middle, last)
    return torch.from_numpy(np.sort(index)).to(points.device)


def compact(points: Tensor, *others: Tensor, group: GroupOrWorld = "world") -> tuple[Tensor, ...]:
    """Exchange the points of a cloud so that each rank holds a compact part of it.

    The cloud may be too large for a single rank. It is halved along its longest side, at the median of a sample, until
    there is one part per rank; parts have about equal sizes. If all ranks can read the cloud, use `shard` instead,
    which exchanges nothing.

    Args:
        points: Positions (n, d) that this rank has now, such as a part of a file; n may differ, and be 0.
        *others: Data of these points, (n,) or (n, C) each: masses, signals, labels.
        group: Process group, or "world" for all processes.

    Returns:
        Indices (n',) of the points that this rank holds now, in the concatenation over all ranks; their positions; and
        their data.
    """
    ranks, x = Group(group), _checks.points("points", points, least=0).detach()
    rows = [x, *(_rows_of("others", other, x) for other in others)]
    lengths = [int(n) for n in ranks.gathered(torch.tensor([len(x)], device=x.device))]
    numbers = sum(lengths[: ranks.rank]) + torch.arange(len(x), device=x.device)
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:: -(-max(lengths) // _SAMPLE) or 1]
    owner = _owners(x, torch.cat(ranks.joined(x[drawn.to(x.device)])), 0, ranks.size)

    columns = [column if column.ndim == 2 else column[:, None] for column in (numbers, *rows)]
    packed = pack(*columns)[torch.argsort(owner, stable=True)]
    counts = torch.stack(ranks.gathered(torch.bincount(owner, minlength=ranks.size)))  # (from, to)
    outgoing = dict(enumerate(packed.split(counts[ranks.rank].tolist())))
    staying = outgoing.pop(ranks.rank)
    incoming = {r: packed.new_empty(int(counts[r, ranks.rank]), packed.shape[1]) for r in outgoing}
    ranks.end_exchange(ranks.begin_exchange(outgoing, incoming))
    parts = incoming | {ranks.rank: staying}
    received = unpack(
        torch.cat([parts[r] for r in range(ranks.size)]), [c.shape[1] for c in columns], [c.dtype for c in columns]
    )
    return tuple(x if before.ndim == 2 else x[:, 0] for x, before in zip(received, (numbers, *rows), strict=True))


def _owners(points: Tensor, sample: Tensor, first: int, last: int) -> Tensor:
    """Assign each of the points (n, d) to one of the ranks first … last − 1, by halving the sample; shape (n,)."""
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


def gather(x: Tensor, index: Tensor, group: GroupOrWorld = "world") -> Tensor:
    """Gather the rows of all ranks on each of them, in the order of the cloud before `shard`.

    Args:
        x: Rows (n, …) of this rank, one per point.
        index: Indices (n,) of its points, from `shard`.
        group: Process group, or "world" for all processes.

    Returns:
        All rows, shape (N, …).
    """
    ranks = Group(group)
    rows, numbers = torch.cat(ranks.joined(x)), torch.cat(ranks.joined(index))
    return torch.empty_like(rows).index_copy_(0, numbers, rows)


def _rows_of(name: str, array: ArrayLike, points: Tensor) -> Tensor:
    """Convert the data of points (n, d) to a tensor (n,) or (n, C)."""
    tensor = _checks.as_tensor(name, array).detach().to(points.device)
    if tensor.ndim not in (1, 2) or len(tensor) != len(points):
        raise ValueError(
            f"`{name}` should have one row per point, shape ({len(points)},) or ({len(points)}, C); "
            f"got {_checks.shape_of(tensor)}."
        )
    return tensor
