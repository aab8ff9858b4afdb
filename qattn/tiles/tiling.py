"""Clouds in tiles, the memory layout of the compiled loops, with boxes that bound the distances of tiles.

A *tile* is `TILE` consecutive points, a *part* of it `PART` points. With the points in the order of a balanced k-d tree
(`kd_order`), tiles are compact, their boxes bound how near two of them can come, and every aligned run of 2ⁿ tiles is a
node of a binary tree.

Coordinates are stored unchanged, so that differences of them are rounded once, wherever the cloud is.
"""

import math
from functools import cached_property, partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from qattn.ranks import ALONE, Ranks
from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import chunks, share
from qattn.tiles.when_to_compile import Loop, charge, is_due

__all__ = ["FACTOR", "Tiling", "Tree", "Weights", "excess", "log2_sum", "scales_of"]

FACTOR = math.sqrt(0.5 / math.log(2))  # exp(−½ x²) = 2^(−(FACTOR x)²)
_MIN_POINTS = 2**14  # least number of points per task of a thread
_BY_TORCH = 1e-8  # seconds per number that torch gathers


class Tree(NamedTuple):
    """Boxes (low, high) around the tiles of each cloud, around pairs of tiles, pairs of pairs, up to the cloud.

    Node i of level n consists of the nodes 2i and 2i + 1 of level n − 1; level 0 are the tiles.
    """

    parts: Tensor  # (B · T · TILE/PART, 2 D)
    nodes: Tensor  # (B, nodes, 2 D)
    starts: Tensor  # (levels + 1,) int64: first node of each level


class Weights(NamedTuple):
    """Weights 2^β of the points of a tiling, with sums of them, in log₂."""

    beta: Tensor  # (B T, TILE): β over a scale, −inf in the padding of the last tile
    top: Tensor  # (B, 1): exp(b) = 2^β e^top
    parts: Tensor  # (B · T · TILE/PART,) log₂ Σ 2^β
    tiles: Tensor  # (B, T) log₂ Σ 2^β
    least: Tensor  # (B T,) least β of each tile

    def nodes(self) -> Tensor:
        """Sum over the nodes of the tree, log₂ Σ 2^β, (B · nodes,)."""
        level = self.tiles
        levels = [level]
        while level.shape[1] > 1:
            level = log2_sum(pad(level, (0, level.shape[1] % 2), value=-torch.inf).unflatten(1, (-1, 2)))
            levels.append(level)
        return torch.cat(levels, dim=1).flatten()


class Tiling:
    """Points (B, N, D) of B clouds in tiles, the last point repeated to fill the last tile.

    Args:
        points: Coordinates.
        order: Order (B, N) of the points in the tiles, as from `kd_order`; None for the order of the cloud.
    """

    def __init__(self, points: Tensor, order: Tensor | None = None) -> None:
        self.clouds, self.size, self.dims = points.shape
        self.tiles = -(-self.size // TILE)  # per cloud
        self.order = torch.arange(self.size).repeat(self.clouds, 1) if order is None else order
        self.cloud = points.detach()

    @cached_property
    def points(self) -> Tensor:
        """Points tile by tile, (B T, TILE, D)."""
        return self.rows(self.cloud)

    @cached_property
    def columns(self) -> Tensor:
        """Points tile by tile and coordinate by coordinate, (B T, D, TILE)."""
        return self.points.mT.contiguous()

    def rows(self, x: Tensor, width: int | None = None) -> Tensor:
        """Gather x (B, N, C), on the CPU, into tiles (B T, TILE, width), with zeros after C channels.

        The last row is repeated to fill the last tile.
        """
        width, loop = x.shape[-1] if width is None else width, Loop("layout", x.dtype)
        if not is_due(loop, seconds := _BY_TORCH * x.numel()):
            charge(loop, seconds)
            return pad(self.tiled(x.detach()), (0, width - x.shape[-1]))
        from qattn.tiles.loops.layout import gather_rows  # here, because importing Numba takes a while

        rows = x.new_empty(self.clouds * self.tiles, TILE, width)
        share(partial(gather_rows, x.detach().contiguous().numpy(), self.order.numpy(), rows.numpy()), self.chunks)
        loop.remember()
        return rows

    def columns_of(self, x: Tensor) -> Tensor:
        """Gather x (B, N, C), on the CPU, into tiles (B T, C, TILE)."""
        from qattn.tiles.loops.layout import gather_columns

        columns = x.new_empty(self.clouds * self.tiles, x.shape[-1], TILE)
        share(
            partial(gather_columns, x.detach().contiguous().numpy(), self.order.numpy(), columns.numpy()), self.chunks
        )
        return columns

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undo `rows`: (B T, TILE, C) as (B, N, C), in the order of the cloud."""
        from qattn.tiles.loops.layout import scatter_rows

        x = rows.new_empty(self.clouds, self.size, rows.shape[-1])
        share(partial(scatter_rows, rows.contiguous().numpy(), self.order.numpy(), x.numpy()), self.chunks)
        return x

    def weights(self, bias: Tensor, top: Tensor | None = None, scale: Tensor | None = None) -> "Weights":
        """Convert biases (B, N), on the CPU, to base 2: exp(b) = 2^β e^top.

        Args:
            bias: Biases in the order of the cloud.
            top: Shift (B, 1); by default the largest bias of each cloud, so that the largest β is 0.
            scale: Divisors (B,) of `Weights.beta`; 1 by default.
        """
        from qattn.tiles.loops.layout import gather_weights

        if top is None:
            top = bias.amax(-1, keepdim=True)
            top = torch.where(top == -torch.inf, 0, top)
        scale = torch.ones(self.clouds, dtype=bias.dtype) if scale is None else scale
        count = self.clouds * self.tiles
        beta, parts, (sums, least) = (
            bias.new_empty(count, TILE),
            bias.new_empty(count, TILE // PART),
            bias.new_empty(2, count),
        )
        arrays = [
            x.numpy()
            for x in (bias.detach().contiguous(), self.order, top[:, 0].contiguous(), scale, beta, parts, sums, least)
        ]
        share(partial(gather_weights, *arrays), self.chunks)
        return Weights(beta, top, parts.flatten(), sums.reshape(self.clouds, self.tiles), least)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Ranges of tiles for the threads, each with enough points to pay for the overhead."""
        return chunks(self.clouds * self.tiles, _MIN_POINTS // TILE)

    @cached_property
    def _rank(self) -> Tensor:
        """Position of each point in the order, (B, N)."""
        rank = torch.empty_like(self.order, memory_format=torch.contiguous_format)
        return rank.scatter_(1, self.order, torch.arange(self.size, device=rank.device).expand_as(rank))

    def sort(self, x: Tensor) -> Tensor:
        """Reorder x (B, N) or (B, N, C), on any device, from the order of the cloud to that of the tiles."""
        return _take(x, self.order.to(x.device))

    def unsort(self, x: Tensor) -> Tensor:
        """Reorder x (B, N) or (B, N, C), on any device, from the order of the tiles to that of the cloud."""
        return _take(x, self._rank.to(x.device))

    def tiled(self, x: Tensor) -> Tensor:
        """Sort x (B, N) or (B, N, C), on any device, into tiles (B T, TILE[, C]); the last row fills the last tile."""
        padded = torch.arange(self.tiles * TILE).clamp(max=self.size - 1)
        return _take(x, self.order[:, padded].to(x.device)).reshape(-1, TILE, *x.shape[2:])

    def padded(self, x: Tensor, value: float) -> Tensor:
        """Sort x (B, N) into tiles (B T, TILE), with a number to fill the last tile."""
        return pad(self.sort(x), (0, self.tiles * TILE - self.size), value=value).reshape(-1, TILE)

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

    def boxes(self, width: int) -> Tensor:
        """Compute boxes (low, high) around blocks of so many tiles, (B, blocks, 2 D)."""
        return _joined(self.tree.nodes[:, : self.tiles], width)

    def least_of_nodes(self, x: Tensor) -> Tensor:
        """Compute the least x over the tiles of each node, (B, T) to (B, nodes)."""
        levels = [x]
        while x.shape[1] > 1:
            x = pad(x, (0, x.shape[1] % 2), value=torch.inf).unflatten(1, (-1, 2)).amin(-1)
            levels.append(x)
        return torch.cat(levels, dim=1)


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


def log2_sum(x: Tensor) -> Tensor:
    """Compute log₂ Σ 2^x over the last axis."""
    largest = x.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    return largest[..., 0] + torch.log2(torch.exp2(x - largest).sum(-1))


def excess(value: Tensor, bias: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Compute log max(1, max_c |v_jc| / mean_c), (B, M): by how much values exceed the mean size of their channel.

    The means of the sizes of values (B, M, C) have the weights e^b. With a large value, a key of small weight matters
    as much as one of large weight.
    """
    sizes, top = value.detach().abs().to(bias.dtype), ranks.highest(bias.T)[:, None]
    weights = torch.exp(bias - torch.where(top == -torch.inf, 0, top))  # (B, M)
    total = ranks.total(weights).clamp(min=1)[:, None]  # the largest weight is 1
    mean = ranks.sum(torch.einsum("bm,bmc->bc", weights, sizes)) / total
    largest = sizes.div_(torch.where(mean > 0, mean, torch.inf)[:, None]).amax(-1)
    return largest.clamp_(min=1).log_()


def scales_of(query: Tiling, sigma: Tensor | None) -> Tensor:
    """Return c (B,) with exp(−‖x − y‖² / 2σ²) = 2^(−c ‖x − y‖²)."""
    ones = torch.ones(query.clouds, dtype=query.cloud.dtype)
    return ones * FACTOR**2 if sigma is None else (FACTOR / sigma.detach().cpu().double()).square().to(ones)
