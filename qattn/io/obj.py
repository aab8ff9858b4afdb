"""OBJ files: one list of vertices, regardless of the objects, groups and materials of the faces."""

import re
import warnings

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import PartlyReadWarning, RefusedError
from qattn.io.polygons import fan_triangles

__all__ = ["read_obj"]


def read_obj(data: bytes, limit: int) -> Cloud:
    """Read the lines `v` and `f`; the size of the file bounds the memory.

    Normals and texture coordinates are ignored: they would split vertices at seams.
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
    faces = fan_triangles(np.array(corners, np.int64), np.array(counts, np.int64))
    return cloud_from_arrays(table[:, :3], faces, _colors(table))


def _corner(word: str, num_vertices: int) -> int:
    """Return the index from 0 of a corner such as `7/1/3`; negative numbers count back from the last vertex so far."""
    number = int(word.partition("/")[0])
    if number == 0 or number < -num_vertices:
        raise ValueError(f"a face has a corner {number}, and vertices are counted from 1")
    return number - 1 if number > 0 else num_vertices + number


def _colors(table: np.ndarray) -> dict[str, np.ndarray]:
    """Return the colors behind the coordinates, as bytes if they are fractions."""
    if table.shape[1] < 6:
        return {}
    colors = table[:, -3:]
    if colors.min() >= 0 and colors.max() <= 1:
        colors = np.rint(255 * colors).astype(np.uint8)
    return dict(zip(("red", "green", "blue"), colors.T, strict=True))
