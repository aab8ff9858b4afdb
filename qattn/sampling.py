"""Points and voxels of a triangle mesh: on its surface, and in its inside.

A mesh is a pair (vertices (N, 3), faces (F, 3)) of tensors or arrays, or a `trimesh.Trimesh`. Its inside are the points
from which a ray crosses it an odd number of times, which is asked of trimesh (extra `io`); surfaces need the library
alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qattn import _checks

__all__ = ["Voxels", "in_volume", "on_surface", "voxelize_solid", "voxelize_surface"]

_MOST_VOXELS = 2**28  # of a grid: a quarter of a gigabyte, and four times that while it is filled
_CELLS_ACROSS = 64  # of the grid that `in_volume` rejects by: most of a shape is then inside without a ray
_MOST_DRAWN = 2**20
_MOST_IN_VAIN = 2**18  # points of which none is inside
_FLAT = 1e-12  # of the longest axis: less is rounding
_NO_VOLUME = "The mesh contains no volume: its faces lie on one another. Sample it by `on_surface`."
_AT_ONCE = 2**16  # pairs of a triangle and a cell
_TOUCH = 1e-9  # of a voxel: rounding, so that what touches counts as meeting


class Voxels(NamedTuple):
    """A grid of cubes, `mask` telling which are occupied; voxel (i, j, k) has its centre at origin + (i, j, k) spacing.

    Attributes:
        mask: Shape (nx, ny, nz), boolean.
        origin: The centre of voxel (0, 0, 0), shape (3,): multiples of the spacing, so that grids fit one another.
        spacing: The edge length of a voxel.
    """

    mask: Any
    origin: Any
    spacing: float


def on_surface(mesh: Any, n: int, seed: int = 0) -> tuple[Any, Any]:
    """n random points of the surface, uniform in area.

    Returns:
        Points (n, 3) and the numbers (n,) of the faces they lie on; arrays unless the vertices are a tensor.

    Example:
        >>> points, face = on_surface(shapes.sphere_mesh(3), 100)
        >>> bool((points.norm(dim=-1) > 0.98).all())
        True
    """
    vertices, faces = _checks.mesh(mesh)
    n, generator = _checks.integer("n", n, 1), torch.Generator().manual_seed(seed)
    a, b, c = vertices.detach().cpu().double()[faces.cpu()].unbind(1)
    total = torch.linalg.vector_norm(torch.linalg.cross(b - a, c - a), dim=-1).cumsum(0)
    if total[-1] == 0:
        raise ValueError("The mesh has no area: all of its triangles are segments or points.")
    drawn = torch.rand(n, dtype=torch.float64, generator=generator) * total[-1]
    face = torch.searchsorted(total, drawn, right=True).clamp(max=len(total) - 1)
    u, v = torch.rand(2, n, 1, dtype=torch.float64, generator=generator)
    u = u.sqrt()  # uniform in the triangle, √u being the distance from its corner a
    points = (1 - u) * a[face] + u * ((1 - v) * b[face] + v * c[face])
    return _given(mesh, points.to(vertices)), _given(mesh, face.to(vertices.device))


def in_volume(mesh: Any, n: int, seed: int = 0) -> Any:
    """n random points of the inside of a closed mesh, shape (n, 3), uniform in volume.

    Drawn in the cells of a grid that the mesh meets or contains; only those of the former are asked where they are.
    The grid has as many cells along each axis of a box about the mesh, so that thin plates fill their cells too.

    Example:
        >>> points = in_volume(shapes.sphere_mesh(3), 100)
        >>> bool((points.norm(dim=-1) < 1).all())
        True
    """
    vertices, faces = _checks.mesh(mesh)
    n, generator = _checks.integer("n", n, 1), torch.Generator().manual_seed(seed)
    x, faces = vertices.detach().cpu().double(), faces.cpu()
    origin, axes, extent = _box(x[faces].flatten(0, 1))
    closed = _Closed(((x - origin) @ axes) / torch.where(extent > 0, extent / _CELLS_ACROSS, 1), faces)
    if extent.amin() <= _FLAT * extent.amax():
        raise ValueError(_NO_VOLUME)
    solid, low = closed.solid()
    cells = solid.nonzero()
    parts, count, drawn = [], 0, 0
    while count < n:
        size = min(2 * (n - count) + 1000, _MOST_DRAWN)
        cell = cells[torch.randint(len(cells), (size,), generator=generator)]
        points = low + cell + torch.rand(size, 3, dtype=torch.float64, generator=generator) - 0.5
        is_inside = ~closed.surface[tuple(cell.T)]
        is_inside[~is_inside] = closed.contains(points[~is_inside])
        parts.append(points[is_inside])
        count, drawn = count + len(parts[-1]), drawn + size
        if count == 0 and drawn >= _MOST_IN_VAIN:
            raise ValueError(_NO_VOLUME)
    return _given(mesh, (origin + (extent / _CELLS_ACROSS * torch.cat(parts)[:n]) @ axes.T).to(vertices))


def _box(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A point, three axes as columns, and the lengths (3,) along them of a box about points (n, 3).

    The axes are those of space, or the principal ones of the points if these make a box of less than half the volume.
    """
    origin, space = points.mean(0), torch.eye(3, dtype=points.dtype)
    principal = torch.linalg.eigh((points - origin).T @ (points - origin)).eigenvectors
    along = [(points - origin) @ axes for axes in (space, principal)]
    extents = [x.amax(0) - x.amin(0) for x in along]
    if extents[1].prod() < 0.5 * extents[0].prod():
        return origin, principal, extents[1]
    return origin, space, extents[0]


def voxelize_surface(mesh: Any, spacing: float) -> Voxels:
    """The voxels that meet a triangle of the mesh, those that only touch one included.

    Example:
        >>> voxelize_surface(shapes.sphere_mesh(3), 0.1).mask.shape
        torch.Size([21, 21, 21])
    """
    vertices, faces = _checks.mesh(mesh)
    _checks.positive("`spacing`", spacing)
    mask, low = _surface(vertices.detach().cpu().double() / spacing, faces.cpu())
    return _voxels(mesh, vertices, mask, low, spacing)


def voxelize_solid(mesh: Any, spacing: float) -> Voxels:
    """The voxels that meet a closed mesh or lie inside it."""
    vertices, faces = _checks.mesh(mesh)
    _checks.positive("`spacing`", spacing)
    mask, low = _Closed(vertices.detach().cpu().double() / spacing, faces.cpu()).solid()
    return _voxels(mesh, vertices, mask, low, spacing)


def _voxels(mesh: Any, vertices: Tensor, mask: Tensor, low: Tensor, spacing: float) -> Voxels:
    origin = (spacing * low).to(vertices)
    return Voxels(_given(mesh, mask.to(vertices.device)), _given(mesh, origin), float(spacing))


def _given(mesh: Any, tensor: Tensor) -> Any:
    is_tensor = isinstance(mesh, (tuple, list)) and isinstance(mesh[0], Tensor)
    return tensor if is_tensor else tensor.numpy()


class _Closed:
    """A closed mesh in units of voxels, whose centres are the integers.

    Attributes:
        surface: The voxels that meet it, shape (nx, ny, nz).
    """

    def __init__(self, vertices: Tensor, faces: Tensor) -> None:
        try:
            import rtree  # noqa: F401 (trimesh asks it which triangles a ray may cross)
            import trimesh
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"The inside of a mesh needs {error.name}. Install it with `pip install 'qattn-diffusion[io]'`.",
                name=error.name,
            ) from None
        self._mesh = trimesh.Trimesh(
            vertices.numpy(), faces.numpy()
        )  # merges equal vertices, as along a texture's seam
        if not self._mesh.is_watertight:
            raise ValueError(
                "The mesh should be closed, two faces along each edge, to have an inside. Close it, as by "
                "`trimesh.repair.fill_holes`, or take its surface."
            )
        self.surface, self._low = _surface(vertices, faces)

    def contains(self, points: Tensor) -> Tensor:
        """Whether points (n, 3) in general position lie inside, shape (n,)."""
        from trimesh.ray.ray_util import contains_points

        if len(points) == 0:
            return torch.zeros(0, dtype=torch.bool)
        # Along an axis the box about a ray holds a few triangles; along trimesh's own direction it holds thousands.
        return torch.from_numpy(contains_points(self._mesh.ray, points.numpy(), check_direction=[0.0, 0.0, 1.0]))

    def solid(self) -> tuple[Tensor, Tensor]:
        """The voxels that meet it or lie inside, and the number (3,) of the first."""
        from scipy.ndimage import label

        # What is connected without meeting the surface lies on one side of it, so one point tells about all.
        region, count = label(~self.surface.numpy())
        region = torch.from_numpy(region)
        first = torch.full((count + 1,), region.numel()).scatter_reduce(
            0, region.reshape(-1).long(), torch.arange(region.numel()), "amin"
        )[1:]
        cell = torch.stack(torch.unravel_index(first, region.shape), dim=-1)
        # Off the centre, whose ray might meet a vertex; voxel and surface being apart, any point of it will do.
        shift = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
        is_inside = torch.cat([torch.ones(1, dtype=torch.bool), self.contains(self._low + cell + shift)])
        return is_inside[region], self._low


def _surface(vertices: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """The voxels that meet a triangle, in units of voxels, and the number (3,) of the first.

    A triangle and a cube are apart if and only if they are along one of 13 axes: those of the cube, the normal, and the
    products of edges of either. Cubes are halved from the whole grid down, so that far ones cost nothing.
    """
    triangles = vertices[faces]  # (F, 3, 3)
    low = torch.ceil(triangles.amin((0, 1)) - 0.5 - _TOUCH)
    shape = torch.floor(triangles.amax((0, 1)) + 0.5 + _TOUCH) - low + 1
    if shape.prod() > _MOST_VOXELS:
        sizes = " × ".join(f"{int(size):,}" for size in shape)
        raise ValueError(
            f"`spacing` would make a grid of {sizes} voxels; at most {_MOST_VOXELS:,} fit. "
            f"Take it {float((shape.prod() / _MOST_VOXELS) ** (1 / 3)):.2g} times as large, or more."
        )
    triangles = triangles - low
    first, last = torch.aminmax(triangles, dim=1)  # (F, 3)
    edges = triangles.roll(-1, dims=1) - triangles
    unit = torch.eye(3, dtype=torch.float64)
    crossed = torch.linalg.cross(unit[None, :, None], edges[:, None]).flatten(1, 2)  # (F, 9, 3)
    axes = torch.cat([torch.linalg.cross(edges[:, 0], edges[:, 1])[:, None], crossed], dim=1)  # (F, 10, 3)
    start, end = torch.aminmax(axes @ triangles.mT, dim=-1)  # (F, 10)
    reach = axes.abs().sum(-1)  # of a cube of half edge 1, along each axis

    def meet(triangle: Tensor, centre: Tensor, half: float) -> Tensor:
        """Whether cubes about `centre` meet triangles, shape (P,), as far as the cubes' own axes do not tell."""
        at, margin = (axes[triangle] * centre[:, None]).sum(-1), half * reach[triangle]  # (P, 10)
        return ((at >= start[triangle] - margin) & (at <= end[triangle] + margin)).all(-1)

    octants = torch.cartesian_prod(*3 * [torch.arange(2)])
    size = 2 ** int(shape.max() - 1).bit_length()
    triangle, cell = torch.arange(len(faces)), torch.zeros(len(faces), 3, dtype=torch.int64)
    while size > 1:
        size //= 2
        half = 0.5 * size + _TOUCH
        cell = 2 * cell[:, None] + octants  # (P, 8, 3)
        centre = size * (cell.double() + 0.5) - 0.5
        is_near = ((centre >= first[triangle, None] - half) & (centre <= last[triangle, None] + half)).all(-1)
        triangle, cell, centre = triangle[:, None].expand(-1, 8)[is_near], cell[is_near], centre[is_near]
        pairs = zip(triangle.split(_AT_ONCE), centre.split(_AT_ONCE), strict=True)
        is_met = torch.cat([meet(*pair, half) for pair in pairs])
        triangle, cell = triangle[is_met], cell[is_met]
    mask = torch.zeros(*shape.long().tolist(), dtype=torch.bool)
    mask[tuple(cell.T)] = True
    return mask, low
