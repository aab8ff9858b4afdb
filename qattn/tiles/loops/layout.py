"""Rows of clouds, gathered into tiles in one pass over memory."""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled
from qattn.tiles.loops.cutoff import PARTS
from qattn.tiles.loops.simd import add, exp2, lanes, load, splat, subtract, sum_of
from qattn.tiles.sizes import PART, TILE

__all__ = ["gather_columns", "gather_rows", "gather_weights", "scatter_rows"]

_LOG_2 = math.log(2)


@njit(forceinline=True)
def _place(tile, order):
    """Return the cloud of a tile, and the position of its first point in the order of that cloud."""
    per_cloud = -(-order.shape[1] // TILE)
    cloud = tile // per_cloud
    return cloud, (tile - cloud * per_cloud) * TILE


@compiled
def gather_rows(x, order, rows, begin, end):
    """Write x (B, N, C) to the tiles begin … end − 1 of rows (T, TILE, W), in an order (B, N), with 0 in W − C columns.

    The last point fills the last tile.
    """
    for tile in range(begin, end):
        cloud, first = _place(tile, order)
        for j in range(TILE):
            i = order[cloud, min(first + j, order.shape[1] - 1)]
            for c in range(x.shape[2]):
                rows[tile, j, c] = x[cloud, i, c]
            for c in range(x.shape[2], rows.shape[2]):
                rows[tile, j, c] = 0


@compiled
def gather_columns(x, order, columns, begin, end):
    """Write x (B, N, C) to the tiles begin … end − 1 of columns (T, C, TILE); see `gather_rows`."""
    for tile in range(begin, end):
        cloud, first = _place(tile, order)
        for j in range(TILE):
            i = order[cloud, min(first + j, order.shape[1] - 1)]
            for c in range(x.shape[2]):
                columns[tile, c, j] = x[cloud, i, c]


@compiled
def scatter_rows(rows, order, x, begin, end):
    """Write the tiles begin … end − 1 of rows (T, TILE, C) to x (B, N, C): the inverse of `gather_rows`."""
    for tile in range(begin, end):
        cloud, first = _place(tile, order)
        for j in range(min(TILE, order.shape[1] - first)):
            i = order[cloud, first + j]
            for c in range(x.shape[2]):
                x[cloud, i, c] = rows[tile, j, c]


@compiled
def gather_weights(bias, order, tops, scales, beta, part_sums, sums, least, begin, end):
    """Write biases in base 2 of the tiles begin … end − 1, log₂ of the sums of weights 2^β, and the least β.

    With β_j = (b_j − top) log₂ e, they are beta (T, TILE), β_j divided by the scale of the cloud, and −inf in the
    padding of the last tile; part_sums (T, PARTS) and sums (T,); least (T,). bias and order are (B, N), tops and scales
    (B,). Computed in float64, and rounded once.
    """
    absent, width = beta.dtype.type(-np.inf), lanes(beta)
    own = np.empty(TILE, beta.dtype)
    for tile in range(begin, end):
        cloud, first = _place(tile, order)
        count, top, scale = min(TILE, order.shape[1] - first), float(tops[cloud]), float(scales[cloud])
        own[count:] = absent
        smallest = -absent
        for j in range(count):
            b = (bias[cloud, order[cloud, first + j]] - top) / _LOG_2
            own[j], beta[tile, j] = b, b / scale
            smallest = min(smallest, own[j])
        beta[tile, count:] = absent
        least[tile] = smallest
        for p in range(PARTS):
            largest = absent
            for j in range(p * PART, (p + 1) * PART):
                largest = max(largest, own[j])
            if largest > absent:
                part = splat(beta.dtype.type(0))
                for j in range(p * PART, (p + 1) * PART, width):
                    part = add(part, exp2(subtract(load(own, j), splat(largest))))
                largest += math.log2(sum_of(part))
            part_sums[tile, p] = largest
        largest, total = part_sums[tile].max(), 0.0
        for p in range(PARTS if largest > absent else 0):
            total += 2.0 ** (part_sums[tile, p] - largest)
        sums[tile] = largest + math.log2(total) if largest > absent else absent
