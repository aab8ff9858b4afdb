"""Meshes as arguments: vertices with triangles or tetrahedra between them."""

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike

if TYPE_CHECKING:
    from trimesh import Trimesh

__all__ = ["MeshLike", "check_simplices", "vertices_and_faces"]

MeshLike: TypeAlias = "tuple[ArrayLike, ArrayLike] | list[ArrayLike] | Trimesh"
"""A pair (vertices (N, 3), faces (F, 3)), or a `trimesh.Trimesh`."""


def vertices_and_faces(mesh: MeshLike) -> tuple[Tensor, Tensor]:
    """Return the vertices (N, 3) and the triangles (F, 3) of one mesh."""
    is_pair = isinstance(mesh, tuple | list)  # a Trimesh is recognized without an import
    pair = mesh if is_pair else [getattr(mesh, name) for name in ("vertices", "faces") if hasattr(mesh, name)]
    if len(pair) != 2:
        raise TypeError(
            f"`mesh` should be a pair (vertices, faces) or a trimesh.Trimesh; got {type(mesh).__name__}. "
            "Read a file with `trimesh.load_mesh`."
        )
    vertices = _checks.one_cloud("vertices", pair[0], (3,))
    return vertices, check_simplices("faces", pair[1], 3, vertices)


def check_simplices(name: str, indices: ArrayLike, num_corners: int, vertices: Tensor) -> Tensor:
    """Return the corners (F, num_corners) of triangles or tetrahedra as indices of vertices (*batch, N, d)."""
    tensor, N = _checks.integers(name, indices, "indices of vertices").to(vertices.device), vertices.shape[-2]
    if tensor.ndim != 2 or tensor.shape[-1] != num_corners or len(tensor) == 0:
        shape = _checks.shape_of(tensor)
        raise ValueError(f"`{name}` should have shape (F, {num_corners}) with at least one row; got {shape}.")
    first, last = (int(end) for end in tensor.aminmax())
    if first < 0 or last >= N:
        raise ValueError(
            f"`{name}` should index vertices from 0 to {N - 1}; got indices from {first} to {last}."
            + (" They seem to count from 1: subtract 1." if first == 1 and last == N else "")
        )
    return tensor
