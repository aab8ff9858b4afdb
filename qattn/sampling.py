"""Points and voxels of a triangle mesh, on its surface or inside it.

A mesh is a pair (vertices (N, 3), faces (F, 3)) of tensors or arrays, or a `trimesh.Trimesh`. Results are tensors if
the vertices are a tensor, else arrays. A point is inside if a ray from it crosses the mesh an odd number of times. This
is computed by trimesh (extra `io`); surfaces need no extra.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qattn import _checks
from qattn._meshes import MeshLike, vertices_and_faces
from qattn._types import TensorOrArray, like_input

__all__ = ["Voxels", "in_volume", "on_surface", "voxelize_solid", "voxelize_surface"]

_MAX_VOXELS = 2**28  # of a grid: a quarter of a gigabyte, and four times as much while it is filled
_CELLS_PER_AXIS = 64  # of the grid of `in_volume`: most of a shape then lies in cells that need no ray
_MAX_DRAWS = 2**20  # random points at once
_MAX_VAIN_DRAWS = 2**18  # random points of which none is inside
_FLAT = 1e-12  # relative thickness below which a mesh has no volume
_NO_VOLUME = "The mesh contains no volume: its faces coincide. Sample it by `on_surface`."
_MAX_PAIRS = 2**16  # pairs of a triangle and a cell at once
_TOUCH = 1e-9  # voxels; tolerance for rounding, so that touching counts as meeting


class Voxels(NamedTuple):
    """A grid of cubes; voxel (i, j, k) has its center at origin + (i, j, k) · spacing.

    Attributes:
        mask: Occupied voxels, boolean of shape (nx, ny, nz).
        origin: Center of voxel (0, 0, 0), shape (3,): a multiple of the spacing, so that grids of one spacing align.
        spacing: Edge length of a voxel.
    """

    mask: TensorOrArray
    origin: TensorOrArray
    spacing: float


def on_surface(mesh: MeshLike, num_points: int, seed: int = 0) -> tuple[TensorOrArray, TensorOrArray]:
    """Sample the surface uniformly by area.

    Args:
        mesh: A pair (vertices (N, 3), faces (F, 3)), or a `trimesh.Trimesh`.
        num_points: Number of points.
        seed: Seed of the random numbers.

    Returns:
        Points of shape (num_points, 3), and the indices (num_points,) of the faces that they lie on.

    Examples:
        >>> points, face = on_surface(shapes.sphere_mesh(3), 100)
        >>> bool((points.norm(dim=-1) > 0.98).all())
        True
    """
    vertices, faces = vertices_and_faces(mesh)
    num_points, generator = _checks.integer("num_points", num_points, 1), torch.Generator().manual_seed(seed)
    a, b, c = vertices.detach().cpu().double()[faces.cpu()].unbind(1)
    total = torch.linalg.vector_norm(torch.linalg.cross(b - a, c - a), dim=-1).cumsum(0)
    if total[-1] == 0:
        raise ValueError("The mesh has no area: all of its triangles are segments or points.")
    drawn = torch.rand(num_points, dtype=torch.float64, generator=generator) * total[-1]
    face = torch.searchsorted(total, drawn, right=True).clamp(max=len(total) - 1)
    u, v = torch.rand(2, num_points, 1, dtype=torch.float64, generator=generator)
    u = u.sqrt()  # uniform in the triangle: √u is the relative distance from the corner a
    points = (1 - u) * a[face] + u * ((1 - v) * b[face] + v * c[face])
    return _like(mesh, points.to(vertices)), _like(mesh, face.to(vertices.device))


def in_volume(mesh: MeshLike, num_points: int, seed: int = 0) -> TensorOrArray:
    """Sample the inside of a closed mesh uniformly by volume.

    Points are drawn in the cells of a grid that meet the mesh or lie inside it; rays are cast only for points in cells
    that meet the mesh. The grid has 64 cells along each axis of a box around the mesh, so that thin plates fill their
    cells too.

    Args:
        mesh: A pair (vertices (N, 3), faces (F, 3)), or a `trimesh.Trimesh`.
        num_points: Number of points.
        seed: Seed of the random numbers.

    Returns:
        Points of shape (num_points, 3).

    Examples:
        >>> points = in_volume(shapes.sphere_mesh(3), 100)
        >>> bool((points.norm(dim=-1) < 1).all())
        True
    """
    vertices, faces = vertices_and_faces(mesh)
    num_points, generator = _checks.integer("num_points", num_points, 1), torch.Generator().manual_seed(seed)
    x, faces = vertices.detach().cpu().double(), faces.cpu()
    origin, axes, extent = _box(x[faces].flatten(0, 1))
    closed = _ClosedMesh(((x - origin) @ axes) / torch.where(extent > 0, extent / _CELLS_PER_AXIS, 1), faces)
    if extent.amin() <= _FLAT * extent.amax():
        raise ValueError(_NO_VOLUME)
    solid, corner = closed.solid()
    cells = solid.nonzero()
    parts, count, num_drawn = [], 0, 0
    while count < num_points:
        size = min(2 * (num_points - count) + 1000, _MAX_DRAWS)
        cell = cells[torch.randint(len(cells), (size,), generator=generator)]
        points = corner + cell + torch.rand(size, 3, dtype=torch.float64, generator=generator) - 0.5
        is_inside = ~closed.surface[tuple(cell.T)]
        is_inside[~is_inside] = closed.contains(points[~is_inside])
        parts.append(points[is_inside])
        count, num_drawn = count + len(parts[-1]), num_drawn + size
        if count == 0 and num_drawn >= _MAX_VAIN_DRAWS:
            raise ValueError(_NO_VOLUME)
    points = torch.cat(parts)[:num_points]
    return _like(mesh, (origin + (extent / _CELLS_PER_AXIS * points) @ axes.T).to(vertices))


def _box(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a point, three axes as columns, and the lengths (3,) along them of a box around points (n, 3).

    The axes are those of space, or the principal axes of the points if their box has less than half the volume.
    """
    origin, space = points.mean(0), torch.eye(3, dtype=points.dtype)
    principal = torch.linalg.eigh((points - origin).T @ (points - origin)).eigenvectors
    projections = [(points - origin) @ axes for axes in (space, principal)]
    extents = [x.amax(0) - x.amin(0) for x in projections]
    if extents[1].prod() < 0.5 * extents[0].prod():
        return origin, principal, extents[1]
    return origin, space, extents[0]


def voxelize_surface(mesh: MeshLike, spacing: float) -> Voxels:
    """Find the voxels that meet or touch a triangle of a mesh.

    Args:
        mesh: A pair (vertices (N, 3), faces (F, 3)), or a `trimesh.Trimesh`.
        spacing: Edge length of a voxel.

    Returns:
        A mask of shape (nx, ny, nz), the center of its first voxel, and the spacing.

    Examples:
        >>> voxelize_surface(shapes.sphere_mesh(3), 0.1).mask.shape
        torch.Size([21, 21, 21])
    """
    vertices, faces = vertices_and_faces(mesh)
    _checks.positive("`spacing`", spacing)
    mask, corner = _surface(vertices.detach().cpu().double() / spacing, faces.cpu())
    return _voxels(mesh, vertices, mask, corner, spacing)


def voxelize_solid(mesh: MeshLike, spacing: float) -> Voxels:
    """Find the voxels that meet a closed mesh or lie inside it.

    Args:
        mesh: A pair (vertices (N, 3), faces (F, 3)), or a `trimesh.Trimesh`.
        spacing: Edge length of a voxel.

    Returns:
        A mask of shape (nx, ny, nz), the center of its first voxel, and the spacing.
    """
    vertices, faces = vertices_and_faces(mesh)
    _checks.positive("`spacing`", spacing)
    mask, corner = _ClosedMesh(vertices.detach().cpu().double() / spacing, faces.cpu()).solid()
    return _voxels(mesh, vertices, mask, corner, spacing)


def _voxels(mesh: MeshLike, vertices: Tensor, mask: Tensor, corner: Tensor, spacing: float) -> Voxels:
    origin = (spacing * corner).to(vertices)
    return Voxels(_like(mesh, mask.to(vertices.device)), _like(mesh, origin), float(spacing))


def _like(mesh: MeshLike, result: Tensor) -> TensorOrArray:
    """Return a tensor if the vertices of the mesh are one, else an array."""
    return like_input(result, mesh[0] if isinstance(mesh, (tuple, list)) else mesh.vertices)


class _ClosedMesh:
    """A closed mesh in units of voxels, whose centers are the integers.

    Attributes:
        surface: Voxels that meet the mesh, boolean of shape (nx, ny, nz).
    """

    def __init__(self, vertices: Tensor, faces: Tensor) -> None:
        try:
            import rtree  # noqa: F401 (trimesh needs it to find the triangles near a ray)
            import trimesh
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"The inside of a mesh needs {error.name}. Install it with `pip install 'qattn-diffusion[io]'`.",
                name=error.name,
            ) from None
        self._mesh = trimesh.Trimesh(vertices.numpy(), faces.numpy())  # merges equal vertices, as at texture seams
        if not self._mesh.is_watertight:
            raise ValueError(
                "The mesh should be closed, with two faces at each edge, to have an inside. Close it, for example with "
                "`trimesh.repair.fill_holes`, or sample its surface."
            )
        self.surface, self._corner = _surface(vertices, faces)

    def contains(self, points: Tensor) -> Tensor:
        """Return whether points (n, 3) in general position lie inside, shape (n,)."""
        from trimesh.ray.ray_util import contains_points

        if len(points) == 0:
            return torch.zeros(0, dtype=torch.bool)
        # Along an axis, the box around a ray holds a few triangles; along trimesh's default direction, thousands.
        return torch.from_numpy(contains_points(self._mesh.ray, points.numpy(), check_direction=[0.0, 0.0, 1.0]))

    def solid(self) -> tuple[Tensor, Tensor]:
        """Return the voxels that meet the mesh or lie inside, and the integer position (3,) of the first."""
        from scipy.ndimage import label

        # A connected region that does not meet the surface lies on one side of it, so one point decides for all.
        region, count = label(~self.surface.numpy())
        region = torch.from_numpy(region)
        first = torch.full((count + 1,), region.numel()).scatter_reduce(
            0, region.reshape(-1).long(), torch.arange(region.numel()), "amin"
        )[1:]
        cell = torch.stack(torch.unravel_index(first, region.shape), dim=-1)
        # Off the center, whose ray might hit a vertex; the voxel does not meet the surface, so any point of it will do.
        shift = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
        is_inside = torch.cat([torch.ones(1, dtype=torch.bool), self.contains(self._corner + cell + shift)])
        return is_inside[region], self._corner


def _surface(vertices: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """Return the voxels that meet a triangle, in units of voxels, and the integer position (3,) of the first.

    A triangle and a cube are disjoint if and only if they are disjoint along one of 13 axes: those of the cube, the
    normal, and the cross products of their edges. Cubes are halved from the whole grid down, so far ones are cheap.
    """
    triangles = vertices[faces]  # (F, 3, 3)
    corner = torch.ceil(triangles.amin((0, 1)) - 0.5 - _TOUCH)
    shape = torch.floor(triangles.amax((0, 1)) + 0.5 + _TOUCH) - corner + 1
    if shape.prod() > _MAX_VOXELS:
        sizes = " × ".join(f"{int(size):,}" for size in shape)
        raise ValueError(
            f"`spacing` should give at most {_MAX_VOXELS:,} voxels; it gives a grid of {sizes} voxels. "
            f"Take it at least {float((shape.prod() / _MAX_VOXELS) ** (1 / 3)):.2g} times as large."
        )
    triangles = triangles - corner
    first, last = torch.aminmax(triangles, dim=1)  # (F, 3)
    edges = triangles.roll(-1, dims=1) - triangles
    unit = torch.eye(3, dtype=torch.float64)
    crossed = torch.linalg.cross(unit[None, :, None], edges[:, None]).flatten(1, 2)  # (F, 9, 3)
    axes = torch.cat([torch.linalg.cross(edges[:, 0], edges[:, 1])[:, None], crossed], dim=1)  # (F, 10, 3)
    start, end = torch.aminmax(axes @ triangles.mT, dim=-1)  # (F, 10)
    reach = axes.abs().sum(-1)  # of a cube of half edge 1, along each axis

    def meet(triangle: Tensor, center: Tensor, half: float) -> Tensor:
        """Return whether cubes meet triangles along the 10 axes that are not those of the cube, shape (P,)."""
        position, margin = (axes[triangle] * center[:, None]).sum(-1), half * reach[triangle]  # (P, 10)
        return ((position >= start[triangle] - margin) & (position <= end[triangle] + margin)).all(-1)

    octants = torch.cartesian_prod(*3 * [torch.arange(2)])
    size = 2 ** int(shape.max() - 1).bit_length()
    triangle, cell = torch.arange(len(faces)), torch.zeros(len(faces), 3, dtype=torch.int64)
    while size > 1:
        size //= 2
        half = 0.5 * size + _TOUCH
        cell = 2 * cell[:, None] + octants  # (P, 8, 3)
        center = size * (cell.double() + 0.5) - 0.5
        is_near = ((center >= first[triangle, None] - half) & (center <= last[triangle, None] + half)).all(-1)
        triangle, cell, center = triangle[:, None].expand(-1, 8)[is_near], cell[is_near], center[is_near]
        pairs = zip(triangle.split(_MAX_PAIRS), center.split(_MAX_PAIRS), strict=True)
        is_met = torch.cat([meet(*pair, half) for pair in pairs])
        triangle, cell = triangle[is_met], cell[is_met]
    mask = torch.zeros(*shape.long().tolist(), dtype=torch.bool)
    mask[tuple(cell.T)] = True
    return mask, corner
