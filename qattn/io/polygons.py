"""Triangles of polygons and of strips."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["fan", "strip"]

Array = NDArray[Any]


def fan(corners: Array, counts: Array) -> Array:
    """Cuts polygons into triangles that share their first corner.

    Args:
        corners: The corners of all polygons, one after the other.
        counts: How many corners each polygon has, shape (P,).

    Returns:
        Corners of shape (F, 3), in the order of the polygons.

    Example:
        >>> fan(np.array([0, 1, 2, 3, 7, 8, 9]), np.array([4, 3])).tolist()
        [[0, 1, 2], [0, 2, 3], [7, 8, 9]]
    """
    if len(counts) and counts.min() < 3:
        raise ValueError(f"a face has {counts.min()} corners, and should have three or more")
    triangles = counts - 2
    first = np.repeat(np.cumsum(counts) - counts, triangles)
    step = np.arange(triangles.sum()) - np.repeat(np.cumsum(triangles) - triangles, triangles)
    return corners[np.stack([first, first + step + 1, first + step + 2], axis=-1)]


def strip(corners: Array) -> Array:
    """Cuts strips of triangles, which end at −1, into triangles of one orientation, shape (F, 3).

    Triangles with a repeated corner, by which a strip turns, are left out.

    Example:
        >>> strip(np.array([0, 1, 2, 3, -1, 4, 5, 6])).tolist()
        [[0, 1, 2], [2, 1, 3], [4, 5, 6]]
    """
    ends = np.maximum.accumulate(np.where(corners < 0, np.arange(len(corners)), -1))
    triples = np.stack([corners[:-2], corners[1:-1], corners[2:]], axis=-1)
    is_odd = (np.arange(len(triples)) - ends[: len(triples)] - 1) % 2 == 1
    triples[is_odd, :2] = triples[is_odd, 1::-1]
    a, b, c = triples.T
    return triples[(triples >= 0).all(1) & (a != b) & (b != c) & (c != a)]
