"""OFF, STL and GLB files by trimesh: all parts of a scene, at their places in the scene, as one cloud."""

import json
import struct
import warnings
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import PartlyReadWarning, RefusedError, check_size

__all__ = ["read_glb", "read_off", "read_stl"]

_MAX_ITEM_BYTES = 64  # of an accessor of a GLB file: a 4 × 4 matrix


def read_off(data: bytes, limit: int) -> Cloud:
    """Read a mesh or a cloud; the size of the file bounds the memory."""
    return cloud_from_arrays(*_load(data, "off"))


def read_stl(data: bytes, limit: int) -> Cloud:
    """Read triangles and merge corners with equal coordinates; the size of the file bounds the memory."""
    x, faces, attributes = _load(data, "stl")
    if faces is None:
        return cloud_from_arrays(x, None, attributes)
    x, index = np.unique(x, axis=0, return_inverse=True)
    return cloud_from_arrays(x, index.reshape(-1)[faces], {})


def read_glb(data: bytes, limit: int) -> Cloud:
    """Read all meshes and clouds of a scene."""
    check_size(_declared_bytes(data), limit)
    return cloud_from_arrays(*_load(data, "glb"))


def _load(data: bytes, suffix: str) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Load a scene: its vertices, its faces if it has any, and the attributes that all its parts have."""
    scene = import_module("trimesh").load_scene(
        BytesIO(data), file_type=suffix, process=False, maintain_order=True, skip_materials=True
    )
    parts = [part for part in scene.dump() if len(part.vertices)]  # moved to their places
    if not parts:
        raise RefusedError("it holds no points.")
    starts = np.cumsum([0, *(len(part.vertices) for part in parts)])
    faces = [
        np.asarray(part.faces).reshape(-1, 3) + start
        for part, start in zip(parts, starts, strict=False)
        if hasattr(part, "faces")
    ]
    x = np.concatenate([part.vertices for part in parts])
    return x, np.concatenate(faces) if faces else None, _shared([_attributes(part) for part in parts])


def _declared_bytes(data: bytes) -> int:
    """Return an upper bound of the size of a GLB scene: accessors without data, and meshes once per node."""
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[20 : 20 + length])
    counts = [int(accessor["count"]) for accessor in header.get("accessors", [])]
    meshes = [
        sum(_MAX_ITEM_BYTES * counts[number] for part in mesh["primitives"] for number in _accessors(part))
        for mesh in header.get("meshes", [])
    ]
    instances = [meshes[node["mesh"]] for node in header.get("nodes", []) if "mesh" in node]
    return _MAX_ITEM_BYTES * sum(counts) + sum(meshes) + sum(instances)


def _accessors(primitive: dict[str, Any]) -> list[int]:
    return [*primitive["attributes"].values(), *([primitive["indices"]] if "indices" in primitive else [])]


def _attributes(part: Any) -> dict[str, np.ndarray]:
    """Return colors and other attributes of the vertices of a mesh or a cloud of trimesh."""
    N, attributes = len(part.vertices), {}
    if hasattr(part, "faces"):
        colors = part.visual.vertex_colors if part.visual.kind == "vertex" else None
        attributes = {name: np.asarray(values) for name, values in part.vertex_attributes.items()}
    else:
        colors = part.colors
    if colors is not None and len(colors) == N:
        attributes.update(zip(("red", "green", "blue", "alpha"), np.asarray(colors).T, strict=False))
    return {name: a for name, a in attributes.items() if a.ndim in (1, 2) and len(a) == N and a.dtype.kind in "biuf"}


def _shared(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the attributes that all parts have; warn of those left out."""
    names = dict.fromkeys(name for part in parts for name in part)
    shared = [name for name in names if all(name in part for part in parts)]
    if len(shared) < len(names):
        lost = ", ".join(name for name in names if name not in shared)
        warnings.warn(f"attributes that only some parts have are left out: {lost}.", PartlyReadWarning, stacklevel=2)
    return {name: np.concatenate([part[name] for part in parts]) for name in shared}
