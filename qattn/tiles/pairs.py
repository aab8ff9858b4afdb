"""Sums over pairs of points from both sides: over the keys of each query, and over the queries of each key.

Blocks of queries and blocks of keys meet in rounds, and a block takes part in a round once. So no two threads add to
the same sum, and the order of additions does not depend on the number of threads.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import even_chunks, share
from qattn.tiles.tiling import Tiling, log2_sum

if TYPE_CHECKING:
    from qattn.tiles.loops.cutoff import GaussianCutoff, MixtureCutoff, Reach

__all__ = ["both_sides", "near_blocks", "rounds"]

# The most blocks of queries, or of keys, and about the fewest pairs of points of two blocks.
_MAX_BLOCKS, _MIN_PAIRS = 64, 2**16
Cutoff = TypeVar("Cutoff", "GaussianCutoff", "MixtureCutoff")


def rounds(
    query: Tiling, key: Tiling, near: Tensor | None = None, *, is_half: bool = False
) -> list[list[tuple[int, int, int, int]]]:
    """List tasks, ranges of query tiles and of key tiles, such that no tile occurs twice on one side of a round.

    Args:
        query: Clouds whose blocks meet those of `key`.
        key: Clouds with as many items.
        near: Pairs of blocks that matter, (B, blocks, blocks), by `near_blocks`; None for all.
        is_half: Whether each pair of two blocks of the same cloud occurs once only.
    """
    width = _width(query, key)
    blocks, others = (_blocks(tiling.tiles, width) for tiling in (query, key))
    count = max(len(blocks), len(others))
    result: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
    for b in range(query.clouds):
        is_near = None if near is None else near[b].tolist()
        taken: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(count)]  # blocks in each round
        for step in range(count // 2 + 1 if is_half else count):
            for n, (begin, end) in enumerate(blocks):
                m = (n + step) % count
                if m >= len(others) or (is_half and 2 * step == count and m < n):
                    continue
                place = step
                if is_near is not None:
                    if not is_near[n][m]:
                        continue
                    place = next(r for r, (ns, ms) in enumerate(taken) if n not in ns and m not in ms)
                    taken[place][0].add(n)
                    taken[place][1].add(m)
                first, last = others[m]
                offset, shift = b * query.tiles, b * key.tiles
                result[place].append((offset + begin, offset + end, shift + first, shift + last))
    return [tasks for tasks in result if tasks]


def _width(query: Tiling, key: Tiling) -> int:
    """Return the number of tiles of a block."""
    pairs = query.clouds * query.size * key.size
    most = max(1, min(_MAX_BLOCKS, round(math.sqrt(pairs / _MIN_PAIRS)) // query.clouds))
    width = 1
    while width * most < max(query.tiles, key.tiles):
        width *= 2  # aligned runs of 2ⁿ tiles are nodes of trees
    return width


def _blocks(tiles: int, width: int) -> list[tuple[int, int]]:
    return [(first, min(first + width, tiles)) for first in range(0, tiles, width)]


def near_blocks(query: Tiling, key: Tiling, scale: Tensor, cutoff: "GaussianCutoff", reach: "Reach") -> Tensor:
    """Find the pairs of blocks that matter to one another, (B, blocks of queries, blocks of keys)."""
    B, width = query.clouds, _width(query, key)

    def grouped(x: np.ndarray, tiles: int, fill: float) -> Tensor:
        """Split (B, ≥ tiles) into blocks, (B, blocks, width)."""
        of_tiles = torch.from_numpy(x).reshape(B, -1)[:, :tiles]
        return pad(of_tiles, (0, -tiles % width), value=fill).unflatten(1, (-1, width))

    low, high = query.boxes(width)[:, :, None].chunk(2, dim=-1)
    other_low, other_high = key.boxes(width)[:, None].chunk(2, dim=-1)
    gaps = torch.maximum(low - other_high, other_low - high).clamp(min=0).square().sum(-1)
    decay = scale[:, None, None] * gaps
    to_rows = log2_sum(grouped(cutoff.tops, key.tiles, -torch.inf))[:, None] - decay
    to_columns = log2_sum(grouped(reach.row_tops, query.tiles, -torch.inf))[:, :, None] - decay
    row_least = grouped(reach.row_least, query.tiles, torch.inf).amin(-1)[:, :, None]
    column_least = grouped(reach.column_least, key.tiles, torch.inf).amin(-1)[:, None]
    return (to_rows > row_least) | (to_columns > column_least)


def both_sides(query: Tiling, key: Tiling, cutoff: Cutoff, back: Cutoff | None) -> "Reach":
    """Make the limits of sums over keys, and of sums over queries if there is a cut-off from keys back to queries.

    Both cut-offs are one object if a cloud attends to itself with the same weights on both sides.
    """
    from qattn.tiles.loops.cutoff import Reach, find_least  # here, because importing Numba takes a while

    def least(cutoff: Cutoff, tiling: Tiling) -> Tensor:
        result = torch.empty(tiling.clouds, tiling.tiles, dtype=tiling.points.dtype)
        share(partial(find_least, cutoff, result.numpy().reshape(-1)), even_chunks(result.numel()))
        return result

    row_least = least(cutoff, query)
    row_tops = torch.full_like(row_least, -torch.inf)
    row_part_tops = row_tops.flatten().repeat_interleave(TILE // PART)
    column_least = row_least.new_full((len(cutoff.tops),), torch.inf)
    if back is not None:
        column_least = key.least_of_nodes(row_least if back is cutoff else least(back, key))
        row_tops = torch.from_numpy(back.tops).reshape(query.clouds, -1)[:, : query.tiles]
        row_part_tops = torch.from_numpy(back.part_tops)
    return Reach(*(x.reshape(-1).numpy() for x in (row_least, column_least, row_tops, row_part_tops)))
