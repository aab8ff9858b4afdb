"""Selection of the key tiles that matter to a query tile, by a walk down the tree of boxes.

Bounds of distances give upper and lower bounds of the contribution of a node of keys to the sum of any row of a query
tile. The largest lower bound, or the term of each point itself, is a *floor* of the sums. The tolerance, a fraction of
the floor, is divided among all candidate tiles, and tiles whose upper bound is below their share are left out. So the
cut-off depends on the biases, which contain masses and potentials, and on the sizes of values, not on distances alone.

Bounds depend on the kind of weights, which is the type of the cut-off:

    Gaussian   2^(β − c ‖x − y‖²):                   β − c span² ≤ log₂ ≤ β − c gap²,
    mixture    2^(β − δᵀC⁻¹δ) / √det C, C = A + B:   bounded by the largest eigenvalues and the least det^⅓ (Minkowski).
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from qattn.tiles.compiled import compiled
from qattn.tiles.sizes import PART, TILE

__all__ = [
    "PARTS",
    "GaussianCutoff",
    "MixtureCutoff",
    "Nodes",
    "Reach",
    "find_least",
    "list_near_tiles",
    "near_parts",
    "near_tiles",
    "parts_in_reach",
    "tiles_in_reach",
]

PARTS = TILE // PART
_SHARES = 12  # log₂ of the largest number of tiles that share the tolerance
_LEAST_EIGENVALUE = 0.5  # of a sum of two covariances: 1 without the rounding of long and thin covariances


class GaussianCutoff(NamedTuple):
    """Cut-off for Gaussian weights. Boxes are rows (low, high); logarithms are in base 2; tiles are the first nodes."""

    tol: np.floating  # log₂ of the fraction of a row's sum that may be left out
    floors: np.ndarray  # (query tiles,) known lower bounds of their row sums
    query_tiles: int  # per cloud
    query_nodes: int  # per cloud
    key_nodes: int  # per cloud
    starts: np.ndarray  # (levels + 1,) first node of each level of keys
    queries: np.ndarray  # (clouds · query nodes, 2 D)
    query_parts: np.ndarray  # (query tiles · PARTS, 2 D)
    keys: np.ndarray  # (clouds · key nodes, 2 D)
    key_parts: np.ndarray  # (key tiles · PARTS, 2 D)
    tops: np.ndarray  # (clouds · key nodes,) log₂ Σ 2^β, with larger β for keys of large values
    part_tops: np.ndarray  # (key tiles · PARTS,) the same
    sums: np.ndarray  # (clouds · key nodes,) log₂ Σ 2^β
    scales: np.ndarray  # (clouds,) c


class Nodes(NamedTuple):
    """Sets of Gaussians: boxes around their means, and bounds of their covariances."""

    boxes: np.ndarray  # (n, 6)
    spread: np.ndarray  # (n,) largest eigenvalue
    size: np.ndarray  # (n,) least det^⅓


class MixtureCutoff(NamedTuple):
    """Cut-off for mixtures: the fields of `GaussianCutoff`, with sets of Gaussians in place of boxes."""

    tol: float
    floors: np.ndarray
    query_tiles: int
    query_nodes: int
    key_nodes: int
    starts: np.ndarray
    queries: Nodes
    query_parts: Nodes
    keys: Nodes
    key_parts: Nodes
    tops: np.ndarray
    part_tops: np.ndarray
    sums: np.ndarray
    has_determinant: bool  # whether weights are divided by √det C


@njit(forceinline=True)
def _gap(boxes, a, others, b):
    """Compute the squared distance between two boxes."""
    d = boxes.shape[1] // 2
    total = boxes.dtype.type(0)
    for c in range(d):
        apart = max(boxes[a, c] - others[b, d + c], others[b, c] - boxes[a, d + c])
        if apart > 0:
            total += apart * apart
    return total


@njit(forceinline=True)
def _span(boxes, a, others, b):
    """Compute the largest squared distance between points of two boxes."""
    d = boxes.shape[1] // 2
    total = boxes.dtype.type(0)
    for c in range(d):
        apart = max(boxes[a, d + c] - others[b, c], others[b, d + c] - boxes[a, c])
        total += apart * apart
    return total


@njit(forceinline=True)
def _mixture_decay(squared, spread, size, has_determinant):
    """Compute δ²/spread + ½ log₂ size³."""
    return squared / spread + (1.5 * math.log2(size) if has_determinant else 0.0)


def _decay(cutoff, cloud, row, node):
    """Bound the decay of weights between a query node and a node of keys from below, in log₂."""


def _largest_decay(cutoff, cloud, row, node):
    """Bound the decay of weights between a query node and a node of keys from above, in log₂."""


def _decay_of_parts(cutoff, cloud, row, part):
    """Bound the decay of weights between a part of the queries and a part of the keys from below, in log₂."""


@overload(_decay, jit_options={"forceinline": True})
def _(cutoff, cloud, row, node):
    if cutoff.instance_class is GaussianCutoff:
        return lambda cutoff, cloud, row, node: cutoff.scales[cloud] * _gap(cutoff.queries, row, cutoff.keys, node)
    return lambda cutoff, cloud, row, node: _mixture_decay(
        _gap(cutoff.queries.boxes, row, cutoff.keys.boxes, node),
        cutoff.queries.spread[row] + cutoff.keys.spread[node],
        cutoff.queries.size[row] + cutoff.keys.size[node],
        cutoff.has_determinant,
    )


@overload(_largest_decay, jit_options={"forceinline": True})
def _(cutoff, cloud, row, node):
    if cutoff.instance_class is GaussianCutoff:
        return lambda cutoff, cloud, row, node: cutoff.scales[cloud] * _span(cutoff.queries, row, cutoff.keys, node)
    return lambda cutoff, cloud, row, node: _mixture_decay(
        _span(cutoff.queries.boxes, row, cutoff.keys.boxes, node),
        _LEAST_EIGENVALUE,
        cutoff.queries.spread[row] + cutoff.keys.spread[node],
        cutoff.has_determinant,
    )


@overload(_decay_of_parts, jit_options={"forceinline": True})
def _(cutoff, cloud, row, part):
    if cutoff.instance_class is GaussianCutoff:
        return lambda cutoff, cloud, row, part: (
            cutoff.scales[cloud] * _gap(cutoff.query_parts, row, cutoff.key_parts, part)
        )
    return lambda cutoff, cloud, row, part: _mixture_decay(
        _gap(cutoff.query_parts.boxes, row, cutoff.key_parts.boxes, part),
        cutoff.query_parts.spread[row] + cutoff.key_parts.spread[part],
        cutoff.query_parts.size[row] + cutoff.key_parts.size[part],
        cutoff.has_determinant,
    )


@njit(forceinline=True)
def _least(cutoff, cloud, row, node):
    """Bound the contribution of a node of keys to a row of a query node from below, in log₂."""
    return cutoff.sums[node] - _largest_decay(cutoff, cloud, row, node)


@njit
def near_tiles(tile, cutoff, tiles, most, least):
    """Write the indices of the key tiles that matter to a query tile to `tiles`.

    `most` and `least` are buffers of the same size; on return `most` holds the upper bounds of the tiles.

    Returns:
        The number of tiles, and log₂ of a weight that is too small to matter.
    """
    starts, cloud = cutoff.starts, tile // cutoff.query_tiles
    row, root = cloud * cutoff.query_nodes + tile - cloud * cutoff.query_tiles, cloud * cutoff.key_nodes
    floor = cutoff.floors[tile]
    count = 0
    stack = np.empty((2 * len(starts), 2), np.int64)  # levels, and indices of nodes within them
    stack[0, 0], stack[0, 1] = len(starts) - 2, 0
    height = 1
    while height > 0:
        height -= 1
        level, i = stack[height, 0], stack[height, 1]
        node = root + starts[level] + i
        high = cutoff.tops[node] - _decay(cutoff, cloud, row, node)
        if not high > floor + cutoff.tol - _SHARES:
            continue
        low = _least(cutoff, cloud, row, node)
        floor = max(floor, low)
        if level == 0:
            tiles[count], most[count], least[count] = cloud * starts[1] + i, high, low
            count += 1
            continue
        child = starts[level - 1] + 2 * i
        # The child with the larger lower bound comes next: the floor rises sooner, and more is left out.
        swap = False
        if child + 1 < starts[level]:
            swap = _least(cutoff, cloud, row, root + child) < _least(cutoff, cloud, row, root + child + 1)
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
    num_tiles = 0
    for n in range(count):
        if most[n] > share:
            tiles[num_tiles], most[num_tiles] = tiles[n], most[n]
            num_tiles += 1
    return num_tiles, share


@njit
def near_parts(row, tiles, cutoff, least, near):
    """Write the indices of the parts of key tiles that matter to a part of the queries to `near`; return the count.

    Parts are listed before they are processed: loops without a branch run twice as fast.
    """
    count, cloud = 0, row // (cutoff.query_tiles * PARTS)
    for tile in tiles:
        for part in range(tile * PARTS, (tile + 1) * PARTS):
            near[count] = part
            count += cutoff.part_tops[part] - _decay_of_parts(cutoff, cloud, row, part) > least
    return count


class Reach(NamedTuple):
    """Limits of sums over pairs from both sides: over the keys of each query, and over the queries of each key.

    Logarithms are in base 2. A pair of tiles matters to a row if the cut-off of rows says so, and to a column if the
    same holds with queries and keys exchanged.
    """

    row_least: np.ndarray  # (query tiles,) weights that are too small to matter to a row
    column_least: np.ndarray  # (clouds · key nodes,) the least such weight for columns of a node
    row_tops: np.ndarray  # (query tiles,) log₂ Σ 2^β over rows, as weights of columns
    row_part_tops: np.ndarray  # (query tiles · PARTS,) the same


@compiled
def find_least(cutoff, least, begin, end):
    """Write log₂ of the weight that is too small to matter to each of the query tiles begin … end − 1."""
    tiles, high, low = _buffers(cutoff)
    for tile in range(begin, end):
        _, least[tile] = near_tiles(tile, cutoff, tiles, high, low)


@njit
def tiles_in_reach(tile, cutoff, reach, first, last, tiles):
    """Write the indices of the key tiles first … last − 1, a node, that matter to a query tile or to which it matters.

    Returns:
        The number of tiles.
    """
    starts, cloud = cutoff.starts, tile // cutoff.query_tiles
    row, root = cloud * cutoff.query_nodes + tile - cloud * cutoff.query_tiles, cloud * cutoff.key_nodes
    count = 0
    stack = np.empty((2 * len(starts), 2), np.int64)  # levels, and indices of nodes within them
    level, i = 0, first - cloud * starts[1]
    while (1 << level) < last - first:
        level += 1
    stack[0, 0], stack[0, 1] = level, i >> level
    height = 1
    while height > 0:
        height -= 1
        level, i = stack[height, 0], stack[height, 1]
        node = root + starts[level] + i
        decay = _decay(cutoff, cloud, row, node)
        matters_to_row = cutoff.tops[node] - decay > reach.row_least[tile]
        if not (matters_to_row or reach.row_tops[tile] - decay > reach.column_least[node]):
            continue
        if level == 0:
            tiles[count] = cloud * starts[1] + i
            count += 1
            continue
        for child in range(2 * i, min(2 * i + 2, starts[level] - starts[level - 1])):
            stack[height, 0], stack[height, 1] = level - 1, child
            height += 1
    return count


@njit
def parts_in_reach(row, tiles, cutoff, reach, near):
    """Write the indices of the parts of key tiles that a part of the queries matters to, or that matter to it."""
    count, tile = 0, row // PARTS
    cloud = tile // cutoff.query_tiles
    offset = cloud * cutoff.key_nodes - cloud * cutoff.starts[1]
    for key_tile in tiles:
        least = reach.column_least[key_tile + offset]
        for part in range(key_tile * PARTS, (key_tile + 1) * PARTS):
            decay = _decay_of_parts(cutoff, cloud, row, part)
            near[count] = part
            matters_to_row = cutoff.part_tops[part] - decay > reach.row_least[tile]
            count += matters_to_row or reach.row_part_tops[row] - decay > least
    return count


@njit
def _buffers(cutoff):
    size = cutoff.starts[1] * (len(cutoff.tops) // cutoff.key_nodes)  # key tiles of all clouds
    return np.empty(size, np.int64), np.empty(size, cutoff.tops.dtype), np.empty(size, cutoff.tops.dtype)


@compiled
def list_near_tiles(cutoff, counts, lists):
    """Write the number of key tiles that matter to each query tile, and as many indices as fit a row of `lists`."""
    tiles, most, least = _buffers(cutoff)
    for tile in range(len(counts)):
        counts[tile], _ = near_tiles(tile, cutoff, tiles, most, least)
        for n in range(min(counts[tile], lists.shape[1])):
            lists[tile, n] = tiles[n]
