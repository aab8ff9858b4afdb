"""Clouds in tiles, the memory layout of the compiled loops, with boxes that bound the distances of tiles.

A *tile* is `TILE` consecutive points, a *part* of it `PART` points. With the points in the order of a balanced k-d tree
(`kd_order`), tiles are compact, their boxes bound how near two of them can come, and every aligned run of 2ⁿ tiles is a
node of a binary tree.

Coordinates are stored unchanged, so that differences of them are rounded once, wherever the cloud is.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from qattn.tiles.threads import share

__all__ = ["FACTOR", "PART", "TILE", "Tiling", "Tree", "kd_order"]

TILE = 64
PART = 16  # floats in the widest register
FACTOR = math.sqrt(0.5 / math.log(2))  # exp(−½ x²) = 2^(−(FACTOR x)²)
_MIN_POINTS = 2**14  # least number of points per task of a thread


def kd_order(points: Tensor) -> Tensor:
    """Sort each cloud of points (B, N, D) by a k-d tree with leaves of `PART` points.

    Returns:
        Indices (B, N), int64.
    """
    from qattn.tiles.loops import kd  # here, because importing Numba takes a while

    rows = points.detach().clone(memory_format=torch.contiguous_format).numpy()  # (B, N, D), sorted in place
    B, N, _ = rows.shape
    order = torch.arange(N).repeat(B, 1)
    numbers = order.numpy()
    runs, leaves = [(b, 0, N) for b in range(B)], []
    while runs and len(runs) < 4 * torch.get_num_threads():
        b, first, last = runs.pop(0)
        middle = kd.split(rows[b], numbers[b], first, last, PART) if last - first > _MIN_POINTS else last
        if middle == last:
            leaves.append((b, first, last))
        else:
            runs += [(b, first, middle), (b, middle, last)]
    tasks = runs + leaves

    def run(b: int, first: int, last: int) -> None:
        kd.sort(rows[b], numbers[b], first, last, PART)

    share(run, tasks)
    return order


class Tree(NamedTuple):
    """Boxes (low, high) around the tiles of each cloud, around pairs of tiles, pairs of pairs, up to the cloud.

    Node i of level n consists of the nodes 2i and 2i + 1 of level n − 1; level 0 are the tiles.
    """

    parts: Tensor  # (B · T · TILE/PART, 2 D)
    nodes: Tensor  # (B, nodes, 2 D)
    starts: Tensor  # (levels + 1,) int64: first node of each level


class Tiling:
    """Points (B, N, D) of B clouds in tiles, the last point repeated to fill the last tile.

    Args:
        points: Coordinates.
        order: Order (B, N) of the points in the tiles, as from `kd_order`; None for the order of the cloud.
    """

    def __init__(self, points: Tensor, order: Tensor | None = None) -> None:
        self.clouds, self.size, self.dims = points.shape
        self.tiles = -(-self.size // TILE)  # per cloud
        self.order = order
        self.points = self.tiled(points).contiguous()  # (B T, TILE, D)

    @cached_property
    def columns(self) -> Tensor:
        """Points tile by tile and coordinate by coordinate, (B T, D, TILE)."""
        return self.points.mT.contiguous()

    @cached_property
    def _rank(self) -> Tensor:
        """Position of each point in the order, (B, N)."""
        assert self.order is not None
        rank = torch.empty_like(self.order)
        return rank.scatter_(1, self.order, torch.arange(self.size, device=rank.device).expand_as(rank))

    def sort(self, x: Tensor) -> Tensor:
        """Reorder x (B, N) or (B, N, C) from the order of the cloud to that of the tiles."""
        return x if self.order is None else _take(x, self.order.to(x.device))

    def unsort(self, x: Tensor) -> Tensor:
        """Reorder x (B, N) or (B, N, C) from the order of the tiles to that of the cloud."""
        return x if self.order is None else _take(x, self._rank.to(x.device))

    def tiled(self, x: Tensor) -> Tensor:
        """Sort x (B, N) or (B, N, C) into tiles (B T, TILE[, C]), the last row repeated to fill the last tile."""
        padded = torch.arange(self.tiles * TILE, device=x.device).clamp(max=self.size - 1)
        rows = x[:, padded] if self.order is None else _take(x, self.order[:, padded.cpu()].to(x.device))
        return rows.reshape(-1, TILE, *x.shape[2:])

    def untiled(self, x: Tensor) -> Tensor:
        """Undo `tiled`: x (B T, TILE[, C]) as (B, N[, C]), in the order of the cloud."""
        return self.unsort(x.reshape(self.clouds, self.tiles * TILE, *x.shape[2:])[:, : self.size])

    @cached_property
    def tree(self) -> Tree:
        """Boxes of all nodes."""
        columns = rearrange(self.columns, "t d (p i) -> (t p) d i", i=PART)
        parts = torch.cat([columns.amin(-1), columns.amax(-1)], dim=-1)  # (B T TILE/PART, 2 D)
        level = _joined(parts.reshape(self.clouds, -1, 2 * self.dims), TILE // PART)
        levels = [level]
        while level.shape[1] > 1:
            level = _joined(level, 2)
            levels.append(level)
        starts = torch.tensor([0, *(level.shape[1] for level in levels)]).cumsum(0)
        return Tree(parts, torch.cat(levels, dim=1).contiguous(), starts)

    def log_sums(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log₂ Σ 2^β over each part (B T TILE/PART,) and each node (B, nodes), for β (B T, TILE)."""
        parts = _log2_sum(beta.reshape(self.clouds, -1, PART))  # (B, T TILE/PART)
        level = _log2_sum(parts.reshape(self.clouds, -1, TILE // PART))
        levels = [level]
        while level.shape[1] > 1:
            level = _log2_sum(pad(level, (0, level.shape[1] % 2), value=-torch.inf).unflatten(1, (-1, 2)))
            levels.append(level)
        return parts.flatten(), torch.cat(levels, dim=1)

    def to_base_2(self, bias: Tensor, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convert a bias (B, N) to β (B T, TILE) with exp(b) = 2^β e^top.

        Args:
            bias: Biases in the order of the cloud.
            top: Shift (B, 1); by default the largest bias of each cloud, so that the largest β is 0.

        Returns:
            β, which is −inf in the padding of the last tile, and the shift.
        """
        if top is None:
            top = bias.amax(-1, keepdim=True)
            top = torch.where(top == -torch.inf, 0, top)
        beta = self.sort((bias - top) / math.log(2))
        return pad(beta, (0, self.tiles * TILE - self.size), value=-torch.inf).reshape(-1, TILE), top


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of x (B, N, …) by index (B, N)."""
    if len(x) == 1:
        return x[0].index_select(0, index[0])[None]
    return x.gather(1, index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[2]))


def _joined(boxes: Tensor, count: int) -> Tensor:
    """Compute boxes around groups of `count` consecutive boxes (B, n, 2 D); the last box fills the last group."""
    missing = -boxes.shape[1] % count
    boxes = torch.cat([boxes, boxes[:, -1:].expand(-1, missing, -1)], dim=1).unflatten(1, (-1, count))
    low, high = boxes.chunk(2, dim=-1)
    return torch.cat([low.amin(2), high.amax(2)], dim=-1)


def _log2_sum(x: Tensor) -> Tensor:
    """Compute log₂ Σ 2^x over the last axis."""
    largest = x.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    return largest[..., 0] + torch.log2(torch.exp2(x - largest).sum(-1))
