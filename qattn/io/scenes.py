"""Reads OFF, STL and GLB files by trimesh: all parts of a scene, where the scene puts them, as one cloud."""

import json
import struct
import warnings
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import PartlyReadWarning, cloud_of
from qattn.io.cloud import Cloud
from qattn.io.limits import RefusedError, within

__all__ = ["scene_reader"]

Array = NDArray[Any]

_ROW = 64  # bytes, of the largest item of an accessor


def scene_reader(ending: str) -> Callable[[bytes, int], Cloud]:
    """The reader for a format of trimesh."""

    def read_scene(data: bytes, limit: int) -> Cloud:
        if ending == "glb":
            within(limit, _declared_by_glb(data))
        trimesh = import_module("trimesh")
        scene = trimesh.load_scene(
            BytesIO(data), file_type=ending, process=False, maintain_order=True, skip_materials=True
        )
        parts = [part for part in scene.dump() if len(part.vertices)]  # each where the scene puts it
        if not parts:
            raise RefusedError("it holds no points.")
        counts = np.cumsum([0, *(len(part.vertices) for part in parts)])
        corners = [
            np.asarray(part.faces).reshape(-1, 3) + first
            for part, first in zip(parts, counts, strict=False)
            if hasattr(part, "faces")
        ]
        x, faces = np.concatenate([part.vertices for part in parts]), np.concatenate(corners) if corners else None
        if ending == "stl" and faces is not None:  # triangles by themselves: corners in one place are one vertex
            x, place = np.unique(x, axis=0, return_inverse=True)
            return cloud_of(x, place.reshape(-1)[faces], {})
        return cloud_of(x, faces, _shared([_attributes(part) for part in parts]))

    return read_scene


def _declared_by_glb(data: bytes) -> int:
    """An upper bound of the bytes of a scene: each mesh as often as nodes show it, and accessors without data."""
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[20 : 20 + length])
    counts = [int(accessor["count"]) for accessor in header.get("accessors", [])]
    meshes = [
        sum(_ROW * counts[number] for part in mesh["primitives"] for number in _accessors(part))
        for mesh in header.get("meshes", [])
    ]
    shown = [meshes[node["mesh"]] for node in header.get("nodes", []) if "mesh" in node]
    return _ROW * sum(counts) + sum(meshes) + sum(shown)


def _accessors(part: dict[str, Any]) -> list[int]:
    return [*part["attributes"].values(), *([part["indices"]] if "indices" in part else [])]


def _attributes(part: Any) -> dict[str, Array]:
    """Colors and further attributes of the vertices of a mesh or a cloud of trimesh."""
    N, found = len(part.vertices), {}
    if hasattr(part, "faces"):
        colors = part.visual.vertex_colors if part.visual.kind == "vertex" else None
        found = {name: np.asarray(values) for name, values in part.vertex_attributes.items()}
    else:
        colors = part.colors
    if colors is not None and len(colors) == N:
        found.update(zip(("red", "green", "blue", "alpha"), np.asarray(colors).T, strict=False))
    return {name: a for name, a in found.items() if a.ndim in (1, 2) and len(a) == N and a.dtype.kind in "biuf"}


def _shared(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The attributes that all parts have, joined; others are left out with a word."""
    names = dict.fromkeys(name for part in parts for name in part)
    shared = [name for name in names if all(name in part for part in parts)]
    if len(shared) < len(names):
        lost = ", ".join(name for name in names if name not in shared)
        warnings.warn(f"attributes that only some parts have are left out: {lost}.", PartlyReadWarning, stacklevel=2)
    return {name: np.concatenate([part[name] for part in parts]) for name in shared}
