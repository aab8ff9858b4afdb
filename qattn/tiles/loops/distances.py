"""Sums of distances and of their gradients over all pairs of points, compiled by Numba.

    u_i = Σ_j w_j ‖x_i − y_j‖,    g_i = ∇u_i = Σ_j w_j (x_i − y_j) / ‖x_i − y_j‖.

The columns y are in tiles, coordinate by coordinate; weights of 0 pad the last tile. Sums over a tile have the dtype of
the points, and sums over tiles are float64. `tiny` is the smallest squared distance: points that are closer count as
equal, without a direction.

LLVM vectorizes the loops because sums may be reordered, square roots may be an estimate with a Newton step, and the
range of j is constant. (Numba checks every index that may be negative.)
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled

__all__ = ["TILE", "sum_in_any_dimension", "sum_in_space"]

TILE = 256

_fast = njit(fastmath={"reassoc", "contract", "arcp", "afn", "nsz"}, error_model="numpy")


@_fast
def _tile_in_space(x, y, z, columns, weight, t, tiny):
    zero, one = columns.dtype.type(0), columns.dtype.type(1)
    u = g_x = g_y = g_z = zero
    for j in range(TILE):
        d_x, d_y, d_z = x - columns[t, 0, j], y - columns[t, 1, j], z - columns[t, 2, j]
        square = d_x * d_x + d_y * d_y + d_z * d_z
        w = weight[t, j] * (one / np.sqrt(max(square, tiny)))
        u += w * square
        g_x += w * d_x
        g_y += w * d_y
        g_z += w * d_z
    return u, g_x, g_y, g_z


@compiled
def sum_in_space(rows, columns, weight, begin, end, tiny, u, g):
    """Add sums over columns (T, 3, TILE) with weights (T, TILE) to u (N,) and g (N, 3), for rows begin … end − 1."""
    for t in range(len(columns)):  # a tile of columns stays in the cache while the rows pass
        for i in range(begin, end):
            part, x, y, z = _tile_in_space(rows[i, 0], rows[i, 1], rows[i, 2], columns, weight, t, tiny)
            u[i] += part
            g[i, 0] += x
            g[i, 1] += y
            g[i, 2] += z


@_fast
def _tile_in_any_dimension(rows, i, columns, weight, t, tiny, buffer, g):
    zero, one = rows.dtype.type(0), rows.dtype.type(1)
    for j in range(TILE):
        buffer[j] = zero
    for c in range(rows.shape[1]):
        x = rows[i, c]
        for j in range(TILE):
            difference = x - columns[t, c, j]
            buffer[j] += difference * difference
    u = zero
    for j in range(TILE):
        w = weight[t, j] * (one / np.sqrt(max(buffer[j], tiny)))
        u += w * buffer[j]
        buffer[j] = w
    for c in range(rows.shape[1]):
        x, total = rows[i, c], zero
        for j in range(TILE):
            total += buffer[j] * (x - columns[t, c, j])
        g[i, c] += total
    return u


@compiled
def sum_in_any_dimension(rows, columns, weight, begin, end, tiny, u, g):
    """Add sums over columns (T, d, TILE) with weights (T, TILE) to u (N,) and g (N, d), for rows begin … end − 1."""
    buffer = np.empty(TILE, rows.dtype)
    for t in range(len(columns)):
        for i in range(begin, end):
            u[i] += _tile_in_any_dimension(rows, i, columns, weight, t, tiny, buffer, g)
