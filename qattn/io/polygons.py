"""Triangulation of polygons and of triangle strips."""

import numpy as np

__all__ = ["fan_triangles", "strip_triangles"]


def fan_triangles(corners: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Split polygons into triangles that share their first corner.

    Args:
        corners: Corners of all polygons, one after the other.
        counts: Number of corners of each polygon, shape (P,).

    Returns:
        Corners of shape (F, 3), in the order of the polygons.

    Examples:
        >>> fan_triangles(np.array([0, 1, 2, 3, 7, 8, 9]), np.array([4, 3])).tolist()
        [[0, 1, 2], [0, 2, 3], [7, 8, 9]]
    """
    if len(counts) and counts.min() < 3:
        raise ValueError(f"a face has {counts.min()} corners, and should have three or more")
    num_triangles = counts - 2
    first = np.repeat(np.cumsum(counts) - counts, num_triangles)
    step = np.arange(num_triangles.sum()) - np.repeat(np.cumsum(num_triangles) - num_triangles, num_triangles)
    return corners[np.stack([first, first + step + 1, first + step + 2], axis=-1)]


def strip_triangles(corners: np.ndarray) -> np.ndarray:
    """Split triangle strips, separated by −1, into triangles (F, 3) of one orientation.

    Triangles with a repeated corner, at which a strip turns, are left out.

    Examples:
        >>> strip_triangles(np.array([0, 1, 2, 3, -1, 4, 5, 6])).tolist()
        [[0, 1, 2], [2, 1, 3], [4, 5, 6]]
    """
    ends = np.maximum.accumulate(np.where(corners < 0, np.arange(len(corners)), -1))
    triangles = np.stack([corners[:-2], corners[1:-1], corners[2:]], axis=-1)
    is_odd = (np.arange(len(triangles)) - ends[: len(triangles)] - 1) % 2 == 1
    triangles[is_odd, :2] = triangles[is_odd, 1::-1]
    a, b, c = triangles.T
    return triangles[(triangles >= 0).all(1) & (a != b) & (b != c) & (c != a)]
