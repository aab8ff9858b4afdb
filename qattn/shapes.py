"""Generated shapes for examples and tests, without downloads.

Random shapes take a `seed` for a generator of their own, so that equal calls give equal shapes.
"""

from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from qattn import _checks

__all__ = [
    "CREATURE_PARTS",
    "ball",
    "creature",
    "creature_distance",
    "creature_inside",
    "creature_parts",
    "cube_tetrahedra",
    "posed",
    "sphere",
    "sphere_mesh",
]

CREATURE_PARTS = ("body", "neck", "head", "tail", "fore leg", "hind leg", "ear")


class _Bone(NamedTuple):
    """A capsule around a segment; it rotates about its start together with its descendants."""

    start: tuple[float, float, float]
    end: tuple[float, float, float]
    radius: float
    part: str
    parent: int  # index of the bone that it is attached to; −1 for none


# A creature of capsules, y up, nose along +x; left and right are mirrored in z.
_MIDDLE = [
    _Bone((-0.45, 0.00, 0.0), (0.38, 0.05, 0.0), 0.23, "body", -1),
    _Bone((0.38, 0.10, 0.0), (0.60, 0.45, 0.0), 0.11, "neck", 0),
    _Bone((0.58, 0.50, 0.0), (0.80, 0.44, 0.0), 0.13, "head", 1),
    _Bone((0.80, 0.44, 0.0), (0.95, 0.38, 0.0), 0.07, "head", 2),
    _Bone((-0.60, 0.10, 0.0), (-0.88, 0.42, 0.0), 0.05, "tail", 0),
    _Bone((-0.88, 0.42, 0.0), (-0.80, 0.62, 0.0), 0.04, "tail", 4),
]
_SIDES = [
    _Bone((0.30, -0.10, 0.15), (0.36, -0.62, 0.18), 0.08, "fore leg", 0),
    _Bone((-0.42, -0.08, 0.15), (-0.46, -0.62, 0.18), 0.09, "hind leg", 0),
    _Bone((0.55, 0.58, 0.08), (0.50, 0.78, 0.15), 0.04, "ear", 2),
]
_BONES = [
    *_MIDDLE,
    *_SIDES,
    *(bone._replace(start=(*bone.start[:2], -bone.start[2]), end=(*bone.end[:2], -bone.end[2])) for bone in _SIDES),
]
_BLEND = 0.03  # width over which capsules blend
_BOX = torch.tensor([[-1.1, -0.8, -0.4], [1.1, 0.9, 0.4]])  # contains the creature
_SHELL = 0.02  # largest distance from the surface of the points that are projected onto it
_CELL = 0.04  # edge of the cells by which far points are rejected


def creature_distance(points: Tensor) -> Tensor:
    """Compute the signed distance to the creature, a smooth union of capsules.

    Args:
        points: Positions of shape (*batch, 3).

    Returns:
        Distances of shape (*batch,), negative inside.

    Examples:
        >>> x = torch.linspace(-1.2, 1.2, 25)
        >>> mask = creature_distance(torch.stack(torch.meshgrid(x, x, x, indexing="ij"), dim=-1)) < 0
        >>> mask.shape
        torch.Size([25, 25, 25])
    """
    return -_BLEND * torch.logsumexp(-_bone_distances(points) / _BLEND, dim=0)


def _bone_distances(points: Tensor) -> Tensor:
    """Compute the signed distances to all capsules, shape (bones, *batch)."""
    distances = []
    for bone in _BONES:
        a, b = points.new_tensor(bone.start), points.new_tensor(bone.end)
        along = (((points - a) @ (b - a)) / ((b - a) @ (b - a))).clamp(0, 1)
        distances.append((points - a - along[..., None] * (b - a)).norm(dim=-1) - bone.radius)
    return torch.stack(distances)


def creature_parts(points: Tensor) -> Tensor:
    """Find the nearest part of the creature for each point.

    Args:
        points: Positions of shape (*batch, 3).

    Returns:
        Indices into `CREATURE_PARTS`, shape (*batch,).
    """
    parts = torch.tensor([CREATURE_PARTS.index(bone.part) for bone in _BONES], device=points.device)
    return parts[_bone_distances(points).argmin(0)]


def posed(points: Tensor, seed: int, *, bend: float = 0.5, stretch: float = 0.0) -> Tensor:
    """Move points of the creature to a random pose.

    Args:
        points: Points of the creature at rest, such as those of `creature`, shape (N, 3).
        seed: Seed of the pose.
        bend: Standard deviation in radians of the rotations of limbs about their joints.
        stretch: Standard deviation of the logarithms of the scales of limbs.

    Returns:
        The moved points in the same order, shape (N, 3).

    Examples:
        >>> points, _ = creature(1000)
        >>> walking = posed(points, seed=1)
        >>> walking.shape
        torch.Size([1000, 3])
    """
    _checks.not_negative("bend", bend)
    _checks.not_negative("stretch", stretch)
    x, generator = _checks.points("points", points, (3,)), torch.Generator().manual_seed(seed)
    weights = torch.softmax(-_bone_distances(x) / _BLEND, dim=0)  # (bones, N), as the surfaces blend
    linear, shift = [torch.eye(3).to(x)], [torch.zeros(3).to(x)]  # x ↦ linear x + shift per bone; the body is fixed
    for bone in _BONES[1:]:
        turn, growth = bend * torch.randn(3, generator=generator), stretch * torch.randn((), generator=generator)
        skew = torch.linalg.cross(turn.expand(3, 3), torch.eye(3), dim=-1).T  # v ↦ turn × v
        own = (torch.matrix_exp(skew) * torch.exp(growth)).to(x)
        joint, before = x.new_tensor(bone.start), linear[bone.parent]
        linear.append(before @ own)
        shift.append(before @ (joint - own @ joint) + shift[bone.parent])
    moved = torch.einsum("bij,nj->bni", torch.stack(linear), x) + torch.stack(shift)[:, None]
    return (weights[..., None] * moved).sum(0)


@torch.enable_grad()  # normals are gradients, also under `torch.no_grad`
def creature(num_points: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sample the surface of a four-legged creature of length 2 uniformly.

    Args:
        num_points: Number of points.
        seed: Seed of the random numbers.

    Returns:
        Points and unit normals, both of shape (num_points, 3).
    """
    num_points, generator = _checks.integer("num_points", num_points, 1), torch.Generator().manual_seed(seed)
    is_near = _cells_near_surface()
    parts, count = [], 0
    while count < num_points:
        # Points of a thin shell are projected onto the surface along the gradient: uniform up to curvature.
        points = _random_in_box(8 * num_points, generator)
        points = points[is_near[((points - _BOX[0]) / _CELL).long().unbind(-1)]]
        points = points[creature_distance(points).abs() < _SHELL].requires_grad_()
        for _ in range(3):
            distance = creature_distance(points)
            (gradient,) = torch.autograd.grad(distance.sum(), points)
            points = (points - distance[:, None] * gradient / gradient.square().sum(-1, keepdim=True)).detach()
            points.requires_grad_()
        parts.append(points.detach())
        count += len(points)
    surface, normals = torch.cat(parts)[:num_points], []
    for block in surface.split(2**18):
        block = block.clone().requires_grad_()
        normals.append(torch.autograd.grad(creature_distance(block).sum(), block)[0])
    return surface, torch.nn.functional.normalize(torch.cat(normals), dim=-1)


def creature_inside(num_points: int, seed: int = 0) -> Tensor:
    """Sample the inside of the creature uniformly.

    Args:
        num_points: Number of points.
        seed: Seed of the random numbers.

    Returns:
        Points of shape (num_points, 3).
    """
    num_points, generator = _checks.integer("num_points", num_points, 1), torch.Generator().manual_seed(seed)
    parts, count = [], 0
    while count < num_points:
        points = _random_in_box(16 * num_points, generator)
        parts.append(points[creature_distance(points) < 0])
        count += len(parts[-1])
    return torch.cat(parts)[:num_points]


def _random_in_box(num_points: int, generator: torch.Generator) -> Tensor:
    low, high = _BOX
    return low + (high - low) * torch.rand(min(num_points, 2**20), 3, generator=generator)


def _cells_near_surface() -> Tensor:
    """Mark the cells of the box that may meet the shell: one in ten, which saves most distances."""
    low, high = _BOX.tolist()
    axes = [torch.arange(a + _CELL / 2, b + _CELL, _CELL) for a, b in zip(low, high, strict=True)]
    centers = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return creature_distance(centers).abs() < _SHELL + 0.87 * _CELL  # half a diagonal, as distances are 1-Lipschitz


def sphere(num_points: int, num_dims: int = 3, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sample the unit sphere uniformly.

    Args:
        num_points: Number of points.
        num_dims: Dimension of the space around the sphere.
        seed: Seed of the random numbers; None takes torch's global generator.
        dtype: Type of the coordinates.

    Returns:
        Points of shape (num_points, num_dims).
    """
    return _sphere(num_points, num_dims, _generator(seed), dtype)


def ball(num_points: int, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sample the unit ball uniformly.

    Args:
        num_points: Number of points.
        seed: Seed of the random numbers; None takes torch's global generator.
        dtype: Type of the coordinates.

    Returns:
        Points of shape (num_points, 3).
    """
    generator = _generator(seed)
    points = _sphere(num_points, 3, generator, dtype)
    return points * torch.rand(num_points, 1, generator=generator, dtype=dtype) ** (1 / 3)


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def _sphere(num_points: int, num_dims: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    num_points = _checks.integer("num_points", num_points, 1)
    points = torch.randn(num_points, num_dims, generator=generator, dtype=dtype)
    return points / points.norm(dim=-1, keepdim=True)


def sphere_mesh(num_subdivisions: int) -> tuple[Tensor, Tensor]:
    """Triangulate the unit sphere by halving the edges of an icosahedron.

    Args:
        num_subdivisions: Number n of times that all edges are halved.

    Returns:
        Vertices of shape (10 · 4ⁿ + 2, 3), and faces of shape (20 · 4ⁿ, 3), counterclockwise as seen from outside.
    """
    golden = (1 + 5**0.5) / 2
    rectangle = torch.tensor([[0, y, z] for y in (-1, 1) for z in (-golden, golden)])
    vertices = torch.cat([rectangle.roll(shift, dims=-1) for shift in range(3)])  # (12, 3)
    triples = torch.combinations(torch.arange(12), 3)
    edges = vertices[triples] - vertices[triples.roll(1, dims=-1)]
    faces = triples[(edges.norm(dim=-1) < 2.1).all(-1)]  # edges have length 2, other distances are 3.2 or more
    is_inward = torch.linalg.det(vertices[faces]) < 0
    faces = torch.where(is_inward[:, None], faces.flip(-1), faces)  # (20, 3)
    vertices = torch.nn.functional.normalize(vertices, dim=-1)
    for _ in range(_checks.integer("num_subdivisions", num_subdivisions, 0)):
        sides = torch.stack([faces, faces.roll(-1, dims=-1)], dim=-1)  # (F, 3, 2): ab, bc, ca
        ends, side = sides.sort(dim=-1).values.reshape(-1, 2).unique(dim=0, return_inverse=True)
        ab, bc, ca = (len(vertices) + side).view(-1, 3).unbind(-1)
        a, b, c = faces.unbind(-1)
        vertices = torch.cat([vertices, torch.nn.functional.normalize(vertices[ends].mean(1), dim=-1)])
        quarters = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
        faces = torch.cat([torch.stack(quarter, dim=-1) for quarter in quarters])
    return vertices, faces


def cube_tetrahedra(num_cells: int) -> tuple[Tensor, Tensor]:
    """Split the unit cube into k³ cubes, and each of them into 6 tetrahedra.

    Args:
        num_cells: Number k of cubes per edge.

    Returns:
        Vertices of shape ((k + 1)³, 3), and tetrahedra of shape (6k³, 4) and positive orientation.
    """
    k = _checks.integer("num_cells", num_cells, 1)
    axis = torch.arange(k + 1)
    vertices = torch.cartesian_prod(axis, axis, axis)
    stride = ((k + 1) ** 2, k + 1, 1)
    first = (vertices[(vertices < k).all(-1)] * torch.tensor(stride)).sum(-1)  # (k³,)
    paths = []  # each tetrahedron is a path along the three axes, from one corner of a cube to the opposite one
    for x, y in permutations(range(3), 2):
        path = [0, stride[x], stride[x] + stride[y], sum(stride)]
        is_even = (y - x) % 3 == 1
        paths.append(path if is_even else [path[1], path[0], *path[2:]])
    return vertices / k, (first[:, None, None] + torch.tensor(paths)).reshape(-1, 4)
