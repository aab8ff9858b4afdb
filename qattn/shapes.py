"""Shapes to try things on, generated, so that nothing needs to be downloaded.

What is random takes a `seed` for a generator of its own, so that the same call gives the same shape.
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
    """A capsule about a segment, which turns about its start together with all that hangs on it."""

    start: tuple[float, float, float]
    end: tuple[float, float, float]
    radius: float
    part: str
    parent: int  # the number of the bone that it hangs on; −1 for none


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
_BLEND = 0.03  # the width over which capsules blend
_BOX = torch.tensor([[-1.1, -0.8, -0.4], [1.1, 0.9, 0.4]])  # the creature lies in it
_SHELL, _CELL = 0.02, 0.04  # how far from the surface points are drawn; the edge of the cells that are looked up first


def creature_distance(points: Tensor) -> Tensor:
    """Signed distance (*batch,) of points (*batch, 3) to the creature, below 0 inside; its capsules blend smoothly.

    Example:
        >>> x = torch.linspace(-1.2, 1.2, 25)
        >>> mask = creature_distance(torch.stack(torch.meshgrid(x, x, x, indexing="ij"), dim=-1)) < 0
        >>> mask.shape
        torch.Size([25, 25, 25])
    """
    return -_BLEND * torch.logsumexp(-_bone_distances(points) / _BLEND, dim=0)


def _bone_distances(points: Tensor) -> Tensor:
    """The distances to all capsules, (bones, *batch)."""
    distances = []
    for bone in _BONES:
        a, b = points.new_tensor(bone.start), points.new_tensor(bone.end)
        along = (((points - a) @ (b - a)) / ((b - a) @ (b - a))).clamp(0, 1)
        distances.append((points - a - along[..., None] * (b - a)).norm(dim=-1) - bone.radius)
    return torch.stack(distances)


def creature_parts(points: Tensor) -> Tensor:
    """The part (*batch,) of the creature that points (*batch, 3) are nearest to, a number into `CREATURE_PARTS`."""
    parts = torch.tensor([CREATURE_PARTS.index(bone.part) for bone in _BONES], device=points.device)
    return parts[_bone_distances(points).argmin(0)]


def posed(points: Tensor, seed: int, *, bend: float = 0.5, stretch: float = 0.0) -> Tensor:
    """Points (N, 3) of the creature in a random pose: row n is where point n has gone.

    Args:
        points: Points of the creature as it stands, such as those of `creature`.
        seed: Which pose.
        bend: The spread, in radians, of the angles by which limbs turn about their joints.
        stretch: The spread of the logarithms of how much longer and wider they are.

    Example:
        >>> points, _ = creature(1000)
        >>> walking = posed(points, seed=1)
        >>> walking.shape
        torch.Size([1000, 3])
    """
    _checks.not_negative("bend", bend)
    _checks.not_negative("stretch", stretch)
    x, generator = _checks.points("points", points, (3,)), torch.Generator().manual_seed(seed)
    weights = torch.softmax(-_bone_distances(x) / _BLEND, dim=0)  # (bones, N), as their surfaces blend
    linear, shift = [torch.eye(3).to(x)], [torch.zeros(3).to(x)]  # of each bone, x ↦ linear x + shift; the body stays
    for bone in _BONES[1:]:
        turn, growth = bend * torch.randn(3, generator=generator), stretch * torch.randn((), generator=generator)
        skew = torch.linalg.cross(turn.expand(3, 3), torch.eye(3), dim=-1).T  # v ↦ turn × v
        own = (torch.matrix_exp(skew) * torch.exp(growth)).to(x)
        joint, before = x.new_tensor(bone.start), linear[bone.parent]
        linear.append(before @ own)
        shift.append(before @ (joint - own @ joint) + shift[bone.parent])
    moved = torch.einsum("bij,nj->bni", torch.stack(linear), x) + torch.stack(shift)[:, None]
    return (weights[..., None] * moved).sum(0)


@torch.enable_grad()  # normals are gradients, also where none are asked for
def creature(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """n points spread evenly over the surface of a four-legged creature of length 2, and their normals."""
    n, generator = _checks.integer("n", n, 1), torch.Generator().manual_seed(seed)
    low, high = _BOX
    near = _cells_near_the_surface()
    parts, count = [], 0
    while count < n:
        # Points of a thin shell about the surface, moved onto it along the gradient: even up to curvature.
        points = low + (high - low) * torch.rand(min(8 * n, 2**20), 3, generator=generator)
        points = points[near[((points - low) / _CELL).long().unbind(-1)]]
        points = points[creature_distance(points).abs() < _SHELL].requires_grad_()
        for _ in range(3):
            distance = creature_distance(points)
            (gradient,) = torch.autograd.grad(distance.sum(), points)
            points = (points - distance[:, None] * gradient / gradient.square().sum(-1, keepdim=True)).detach()
            points.requires_grad_()
        parts.append(points.detach())
        count += len(points)
    found = torch.cat(parts)
    normals = []
    for some in found[:n].split(2**18):
        some = some.clone().requires_grad_()
        normals.append(torch.autograd.grad(creature_distance(some).sum(), some)[0])
    return found[:n], torch.nn.functional.normalize(torch.cat(normals), dim=-1)


def _cells_near_the_surface() -> Tensor:
    """Which cells of the box may hold points of the shell: nine in ten do not, and distances are what takes time."""
    low, high = _BOX
    axes = [torch.arange(a + _CELL / 2, b + _CELL, _CELL) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return creature_distance(centres).abs() < _SHELL + 0.87 * _CELL  # half a diagonal: distances grow by that at most


def creature_inside(n: int, seed: int = 0) -> Tensor:
    """n random points of the creature's inside, shape (n, 3)."""
    n, generator = _checks.integer("n", n, 1), torch.Generator().manual_seed(seed)
    low, high = _BOX
    parts, count = [], 0
    while count < n:
        points = low + (high - low) * torch.rand(min(16 * n, 2**20), 3, generator=generator)
        parts.append(points[creature_distance(points) < 0])
        count += len(parts[-1])
    return torch.cat(parts)[:n]


def sphere(n: int, dims: int = 3, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """n random points of the unit sphere, shape (n, dims); without a seed they come from torch's global generator."""
    return _sphere(_checks.integer("n", n, 1), dims, _generator(seed), dtype)


def ball(n: int, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """n random points of the unit ball, shape (n, 3); without a seed they come from torch's global generator."""
    generator = _generator(seed)
    points = _sphere(_checks.integer("n", n, 1), 3, generator, dtype)
    return points * torch.rand(n, 1, generator=generator, dtype=dtype) ** (1 / 3)


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def _sphere(n: int, dims: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    points = torch.randn(n, dims, generator=generator, dtype=dtype)
    return points / points.norm(dim=-1, keepdim=True)


def sphere_mesh(subdivisions: int) -> tuple[Tensor, Tensor]:
    """The unit sphere in 20 · 4^subdivisions triangles, by halving the edges of an icosahedron.

    Returns:
        Vertices (10 · 4^subdivisions + 2, 3), and faces (F, 3) that turn anticlockwise as seen from outside.
    """
    golden = (1 + 5**0.5) / 2
    rectangle = torch.tensor([[0, y, z] for y in (-1, 1) for z in (-golden, golden)])
    vertices = torch.cat([rectangle.roll(shift, dims=-1) for shift in range(3)])  # (12, 3)
    triples = torch.combinations(torch.arange(12), 3)
    edges = vertices[triples] - vertices[triples.roll(1, dims=-1)]
    faces = triples[(edges.norm(dim=-1) < 2.1).all(-1)]  # the vertices of an edge are 2 apart, others 3.2 or more
    is_inward = torch.linalg.det(vertices[faces]) < 0
    faces = torch.where(is_inward[:, None], faces.flip(-1), faces)  # (20, 3)
    vertices = torch.nn.functional.normalize(vertices, dim=-1)
    for _ in range(_checks.integer("subdivisions", subdivisions, 0)):
        sides = torch.stack([faces, faces.roll(-1, dims=-1)], dim=-1)  # (F, 3, 2): ab, bc, ca
        ends, side = sides.sort(dim=-1).values.reshape(-1, 2).unique(dim=0, return_inverse=True)
        ab, bc, ca = (len(vertices) + side).view(-1, 3).unbind(-1)
        a, b, c = faces.unbind(-1)
        vertices = torch.cat([vertices, torch.nn.functional.normalize(vertices[ends].mean(1), dim=-1)])
        quarters = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
        faces = torch.cat([torch.stack(quarter, dim=-1) for quarter in quarters])
    return vertices, faces


def cube_tetrahedra(k: int) -> tuple[Tensor, Tensor]:
    """The unit cube in k³ cubes of 6 tetrahedra each, which go from corner to corner one axis after the other.

    Returns:
        Vertices ((k + 1)³, 3), and tetrahedra (6k³, 4) of positive orientation.
    """
    axis = torch.arange(_checks.integer("k", k, 1) + 1)
    vertices = torch.cartesian_prod(axis, axis, axis)
    stride = ((k + 1) ** 2, k + 1, 1)
    first = (vertices[(vertices < k).all(-1)] * torch.tensor(stride)).sum(-1)  # (k³,)
    paths = []
    for x, y in permutations(range(3), 2):
        path = [0, stride[x], stride[x] + stride[y], sum(stride)]
        is_even = (y - x) % 3 == 1
        paths.append(path if is_even else [path[1], path[0], *path[2:]])
    return vertices / k, (first[:, None, None] + torch.tensor(paths)).reshape(-1, 4)
