"""Reads OBJ files: one list of vertices, whatever objects, groups and materials their faces are sorted into."""

import re
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import PartlyReadWarning, cloud_of
from qattn.io.cloud import Cloud
from qattn.io.limits import RefusedError
from qattn.io.polygons import fan

__all__ = ["read_obj"]

Array = NDArray[Any]


def read_obj(data: bytes, limit: int) -> Cloud:
    """Reads the lines `v` and `f`; `limit` is met by what the file itself takes.

    Normals and texture coordinates, which would cut vertices at seams, are no part of the shape.
    """
    text = re.sub(r"\\\r?\n", " ", data.decode("utf-8", "replace"))
    vertices: list[list[str]] = []
    corners: list[int] = []
    counts: list[int] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["v"]:
            vertices.append(words[1:])
        elif words[:1] == ["f"]:
            corners += [_corner(word, len(vertices)) for word in words[1:]]
            counts.append(len(words) - 1)
    if not vertices:
        raise RefusedError("it holds no points.")
    width = min(map(len, vertices))
    if width < 3:
        raise ValueError("a vertex has fewer than three coordinates")
    if width < max(map(len, vertices)):
        warnings.warn("colors that only some vertices have are left out.", PartlyReadWarning, stacklevel=2)
    table = np.array([words[:width] for words in vertices], np.float64)
    return cloud_of(table[:, :3], fan(np.array(corners, np.int64), np.array(counts, np.int64)), _colors(table))


def _corner(word: str, count: int) -> int:
    """The vertex of a corner as `7/1/3`, from 0; negative numbers count back from the last vertex so far."""
    number = int(word.partition("/")[0])
    if number == 0 or number < -count:
        raise ValueError(f"a face has a corner {number}, and vertices are counted from 1")
    return number - 1 if number > 0 else count + number


def _colors(table: Array) -> dict[str, Array]:
    """Colors behind the coordinates, as bytes if they are fractions."""
    if table.shape[1] < 6:
        return {}
    colors = table[:, -3:]
    if colors.min() >= 0 and colors.max() <= 1:
        colors = np.rint(255 * colors).astype(np.uint8)
    return dict(zip(("red", "green", "blue"), colors.T, strict=True))
