r"""A cloud in tiles: what the compiled loops work on, and how they know which tiles are near.

A *tile* is `TILE` points that follow one another, a *part* of it `PART` of them. With the points in the order of a
balanced k-d tree (`kd_order`), tiles are compact, their boxes tell how near two of them can come, and every aligned run
of 2^n tiles is a node of a binary tree.

Coordinates are those of the cloud, as they were given: differences of them round once, wherever the cloud is.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from qattn._compiled import share

__all__ = ["FACTOR", "PART", "TILE", "Tiling", "Tree", "kd_order"]

TILE = 64
PART = 16  # as many floats as fill the widest register
FACTOR = math.sqrt(0.5 / math.log(2))  # exp(−½ x²) = 2^(−(FACTOR x)²)
_LEAST_POINTS = 2**14  # that pay for starting a thread


def kd_order(points: Tensor) -> Tensor:
    """The order of a k-d tree with leaves of `PART` points, for each cloud of points (B, N, D); (B, N) int64."""
    from qattn import _kd  # here, because importing Numba takes a while

    rows = points.detach().clone(memory_format=torch.contiguous_format).numpy()  # (B, N, D), sorted in place
    B, N, _ = rows.shape
    order = torch.arange(N).repeat(B, 1)
    numbers = order.numpy()
    runs, leaves = [(b, 0, N) for b in range(B)], []
    while runs and len(runs) < 4 * torch.get_num_threads():
        b, first, last = runs.pop(0)
        middle = _kd.split(rows[b], numbers[b], first, last, PART) if last - first > _LEAST_POINTS else last
        if middle == last:
            leaves.append((b, first, last))
        else:
            runs += [(b, first, middle), (b, middle, last)]
    tasks = runs + leaves

    def run(task: tuple[int, int, int]) -> None:
        b, first, last = task
        _kd.sort(rows[b], numbers[b], first, last, PART)

    share(run, tasks, len(tasks))
    return order


class Tree(NamedTuple):
    """Boxes (low, high) about the tiles of each cloud, and about pairs of them, pairs of pairs, up to the whole.

    Node i of level n is made of the nodes 2i and 2i + 1 of level n − 1; level 0 are the tiles.
    """

    parts: Tensor  # (B · T · TILE/PART, 2 D)
    nodes: Tensor  # (B, sum of all levels, 2 D)
    starts: Tensor  # (levels + 1,) int64: where each level begins among the nodes


class Tiling:
    """The points (B, N, D) of B clouds in tiles of `TILE`, the last point repeated to fill the last tile.

    Args:
        points: The coordinates.
        order: The order (B, N) to take them in, such as that of `kd_order`; as they are by default.
    """

    def __init__(self, points: Tensor, order: Tensor | None = None) -> None:
        self.clouds, self.size, self.dims = points.shape
        self.tiles = -(-self.size // TILE)  # of each cloud
        self.order = order
        self.points = self.tiled(points).contiguous()

    @cached_property
    def columns(self) -> Tensor:
        """The points tile by tile and coordinate by coordinate, (B T, D, TILE)."""
        return self.points.mT.contiguous()

    @cached_property
    def _rank(self) -> Tensor:
        """Where each point has gone, (B, N)."""
        assert self.order is not None
        rank = torch.empty_like(self.order)
        return rank.scatter_(1, self.order, torch.arange(self.size, device=rank.device).expand_as(rank))

    def sort(self, x: Tensor) -> Tensor:
        """x (B, N) or (B, N, C) in the order of the tiles."""
        return x if self.order is None else _take(x, self.order.to(x.device))

    def unsort(self, x: Tensor) -> Tensor:
        """x (B, N) or (B, N, C) back in the order of the cloud."""
        return x if self.order is None else _take(x, self._rank.to(x.device))

    def tiled(self, x: Tensor) -> Tensor:
        """x (B, N) or (B, N, C) as (B T, TILE[, C]), the last row repeated to fill the last tile."""
        last = torch.arange(self.tiles * TILE, device=x.device).clamp(max=self.size - 1)
        rows = x[:, last] if self.order is None else _take(x, self.order[:, last.cpu()].to(x.device))
        return rows.reshape(-1, TILE, *x.shape[2:])

    def untiled(self, x: Tensor) -> Tensor:
        """x (B T, TILE[, C]) as (B, N[, C]), in the order of the cloud."""
        return self.unsort(x.reshape(self.clouds, self.tiles * TILE, *x.shape[2:])[:, : self.size])

    @cached_property
    def tree(self) -> Tree:
        """The boxes of all nodes."""
        columns = rearrange(self.columns, "t d (p i) -> (t p) d i", i=PART)
        parts = torch.cat([columns.amin(-1), columns.amax(-1)], dim=-1)  # (B T TILE/PART, 2 D)
        level = _joined(parts.reshape(self.clouds, -1, 2 * self.dims), TILE // PART)
        levels = [level]
        while level.shape[1] > 1:
            level = _joined(level, 2)
            levels.append(level)
        starts = torch.tensor([0, *(level.shape[1] for level in levels)]).cumsum(0)
        return Tree(parts, torch.cat(levels, dim=1).contiguous(), starts)

    def tops(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """log₂ Σ 2^β over each part (B T TILE/PART,) and each node (B, sum of all levels), for β (B T, TILE)."""
        parts = _log2_sum(beta.reshape(self.clouds, -1, PART))  # (B, T TILE/PART)
        level = _log2_sum(parts.reshape(self.clouds, -1, TILE // PART))
        levels = [level]
        while level.shape[1] > 1:
            level = _log2_sum(pad(level, (0, level.shape[1] % 2), value=-torch.inf).unflatten(1, (-1, 2)))
            levels.append(level)
        return parts.flatten(), torch.cat(levels, dim=1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, N, …) by index (B, N)."""
    if len(x) == 1:
        return x[0].index_select(0, index[0])[None]
    return x.gather(1, index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[2]))


def _joined(boxes: Tensor, count: int) -> Tensor:
    """Boxes (B, n, 2 D) about `count` neighbours each, the last repeated where some are missing."""
    missing = -boxes.shape[1] % count
    boxes = torch.cat([boxes, boxes[:, -1:].expand(-1, missing, -1)], dim=1).unflatten(1, (-1, count))
    low, high = boxes.chunk(2, dim=-1)
    return torch.cat([low.amin(2), high.amax(2)], dim=-1)


def _log2_sum(x: Tensor) -> Tensor:
    """log₂ Σ 2^x over the last axis; −inf where there is nothing."""
    largest = x.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    return largest[..., 0] + torch.log2(torch.exp2(x - largest).sum(-1))
