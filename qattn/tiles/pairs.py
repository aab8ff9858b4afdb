"""Sums over pairs of points from both sides: over the keys of each query, and over the queries of each key.

Blocks of queries and blocks of keys meet in rounds, in each of which every block takes part once. So no two threads add
to the same sum, and the order of additions does not depend on the number of threads.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import even_chunks, share
from qattn.tiles.tiling import Tiling

if TYPE_CHECKING:
    from qattn.tiles.loops.cutoff import GaussianCutoff, MixtureCutoff, Reach

__all__ = ["both_sides", "rounds"]

# Blocks of queries, and of keys: how many at most, and how many pairs two of them have at least, about.
_MAX_BLOCKS, _MIN_PAIRS = 64, 2**16
Cutoff = TypeVar("Cutoff", "GaussianCutoff", "MixtureCutoff")


def rounds(query: Tiling, key: Tiling) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield lists of tasks, ranges of query tiles and of key tiles, such that no tile occurs twice in a list."""
    pairs = query.clouds * query.size * key.size
    most = max(1, min(_MAX_BLOCKS, round(math.sqrt(pairs / _MIN_PAIRS)) // query.clouds))
    width = 1
    while width * most < max(query.tiles, key.tiles):
        width *= 2  # aligned runs of 2ⁿ tiles are nodes of trees
    blocks, others = (_blocks(tiling.tiles, width) for tiling in (query, key))
    count = max(len(blocks), len(others))
    for step in range(count):
        met = [(block, others[m]) for n, block in enumerate(blocks) if (m := (n + step) % count) < len(others)]
        yield [
            (b * query.tiles + begin, b * query.tiles + end, b * key.tiles + first, b * key.tiles + last)
            for b in range(query.clouds)
            for (begin, end), (first, last) in met
        ]


def _blocks(tiles: int, width: int) -> list[tuple[int, int]]:
    return [(first, min(first + width, tiles)) for first in range(0, tiles, width)]


def both_sides(query: Tiling, key: Tiling, cutoff: Cutoff, back: Cutoff | None) -> "Reach":
    """Make the limits of sums over keys, and of sums over queries if there is a cut-off from keys back to queries."""
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
        column_least = key.least_of_nodes(least(back, key))
        row_tops = torch.from_numpy(back.tops).reshape(query.clouds, -1)[:, : query.tiles]
        row_part_tops = torch.from_numpy(back.part_tops)
    return Reach(*(x.reshape(-1).numpy() for x in (row_least, column_least, row_tops, row_part_tops)))
