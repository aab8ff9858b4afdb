"""Which tiles of keys matter to a tile of queries: the compiled walk down the tree of boxes.

A node whose keys lie at least `gap` and at most `span` away from all rows of a tile adds between 2^(top − c span²) and
2^(top − c gap²) to each of their sums, where 2^top is the sum of its 2^β and c the scale of its cloud. The larger of
these lower bounds, and of what each row adds to itself, is a *floor* under the sums. What may be left out is shared out
among as many tiles as come into question, and whatever cannot reach its share is left out. So the cut-off follows from
the biases, masses and potentials included, and from the sizes of values, and not from distances alone.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from qattn._compiled import compiled

__all__ = ["Cutoff", "box_gap", "box_span", "count_near", "list_near_tiles", "near_parts", "near_tiles"]

_SHARES = 12  # log₂ of the most tiles among which the tolerance is shared out


class Cutoff(NamedTuple):
    """What decides which tiles are near; boxes are rows (low, high), and weights in base 2."""

    tol: np.floating  # log₂ of the fraction of a row's sum that may be left out
    scales: np.ndarray  # (clouds,) c of the weights 2^(β − c ‖x − y‖²)
    floors: np.ndarray  # (tiles of queries,) a known floor under their sums
    query_tiles: int  # of each cloud
    queries: np.ndarray  # (clouds, nodes, 2 D) their boxes, tiles first
    query_parts: np.ndarray  # (tiles of queries · parts, 2 D)
    key_parts: np.ndarray  # (tiles of keys · parts, 2 D)
    part_tops: np.ndarray  # (tiles of keys · parts,) log₂ of what keys weigh at most, in the sum or by their values
    nodes: np.ndarray  # (clouds, nodes, 2 D) the boxes of the keys
    tops: np.ndarray  # (clouds, nodes) the same
    sums: np.ndarray  # (clouds, nodes) log₂ of what they weigh in the sum
    starts: np.ndarray  # (levels + 1,) where the levels begin among the nodes


@njit(forceinline=True)
def box_gap(boxes, a, others, b):
    """The squared distance between two boxes."""
    d = boxes.shape[1] // 2
    total = boxes.dtype.type(0)
    for c in range(d):
        apart = max(boxes[a, c] - others[b, d + c], others[b, c] - boxes[a, d + c])
        if apart > 0:
            total += apart * apart
    return total


@njit(forceinline=True)
def box_span(boxes, a, others, b):
    """The largest squared distance between points of two boxes."""
    d = boxes.shape[1] // 2
    total = boxes.dtype.type(0)
    for c in range(d):
        apart = max(boxes[a, d + c] - others[b, c], others[b, d + c] - boxes[a, c])
        total += apart * apart
    return total


@njit
def near_tiles(tile, cutoff, found, most, least):
    """Writes the numbers of the key tiles that matter to a query tile to `found`.

    `most` and `least` are buffers of its size. Returns their count, and log₂ of a weight that is too little to matter.
    """
    cloud = tile // cutoff.query_tiles
    boxes, box = cutoff.queries[cloud], tile - cloud * cutoff.query_tiles
    nodes, tops, sums, starts = cutoff.nodes[cloud], cutoff.tops[cloud], cutoff.sums[cloud], cutoff.starts
    floor, scale = cutoff.floors[tile], cutoff.scales[cloud]
    count = 0
    stack = np.empty((2 * len(starts), 2), np.int64)
    stack[0, 0], stack[0, 1] = len(starts) - 2, 0  # a level and a number in it
    height = 1
    while height > 0:
        height -= 1
        level, i = stack[height, 0], stack[height, 1]
        node = starts[level] + i
        high = tops[node] - scale * box_gap(boxes, box, nodes, node)
        if not high > floor + cutoff.tol - _SHARES:
            continue
        low = sums[node] - scale * box_span(boxes, box, nodes, node)
        floor = max(floor, low)
        if level == 0:
            found[count], most[count], least[count] = cloud * starts[1] + i, high, low
            count += 1
            continue
        first = starts[level - 1] + 2 * i
        is_pair = first + 1 < starts[level]
        # The child that is sure to add more comes next: the floor rises sooner, and more is left out.
        swap = False
        if is_pair:
            one, two = box_span(boxes, box, nodes, first), box_span(boxes, box, nodes, first + 1)
            swap = sums[first] - scale * one < sums[first + 1] - scale * two
            stack[height, 0], stack[height, 1] = level - 1, 2 * i + (not swap)
            height += 1
        stack[height, 0], stack[height, 1] = level - 1, 2 * i + swap
        height += 1

    if count == 0:
        return 0, floor
    total = 0.0
    for n in range(count):
        total += 2.0 ** (least[n] - floor)
    floor += math.log2(max(total, 1.0))
    share = floor + cutoff.tol - min(math.log2(count), _SHARES)
    kept = 0
    for n in range(count):
        if most[n] > share:
            found[kept] = found[n]
            kept += 1
    return kept, share


@njit
def near_parts(row, tiles, cutoff, least, parts, near):
    """Writes the numbers of those parts of a list of key tiles that matter to a part of the queries to `near`.

    Returns their count. Parts are all listed first: work without a branch in it runs twice as fast.
    """
    count, scale = 0, cutoff.scales[row // (cutoff.query_tiles * parts)]
    for tile in tiles:
        for part in range(tile * parts, (tile + 1) * parts):
            near[count] = part
            count += cutoff.part_tops[part] - scale * box_gap(cutoff.query_parts, row, cutoff.key_parts, part) > least
    return count


@njit
def _buffers(cutoff):
    size = cutoff.starts[1] * len(cutoff.tops)
    return np.empty(size, np.int64), np.empty(size, cutoff.tops.dtype), np.empty(size, cutoff.tops.dtype)


@compiled
def list_near_tiles(cutoff, counts, lists):
    """Writes how many key tiles matter to each query tile, and as many of them as fit a row of `lists`."""
    found, most, least = _buffers(cutoff)
    for tile in range(len(counts)):
        counts[tile], _ = near_tiles(tile, cutoff, found, most, least)
        for n in range(min(counts[tile], lists.shape[1])):
            lists[tile, n] = found[n]


@compiled
def count_near(tiles, cutoff, parts):
    """How many key tiles matter to some query tiles, and how many pairs of their parts."""
    found, most, least = _buffers(cutoff)
    near = np.empty(parts * len(found), np.int64)
    pairs, pairs_of_parts = 0, 0
    for tile in tiles:
        count, too_little = near_tiles(tile, cutoff, found, most, least)
        pairs += count
        for row in range(tile * parts, (tile + 1) * parts):
            pairs_of_parts += near_parts(row, found[:count], cutoff, too_little, parts, near)
    return pairs, pairs_of_parts
