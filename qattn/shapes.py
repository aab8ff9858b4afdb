"""Shapes to try things on, generated, so that nothing needs to be downloaded.

What is random takes a `seed` for a generator of its own, so that the same call gives the same shape.
"""

from itertools import permutations

import torch
from torch import Tensor

from qattn import _checks

__all__ = ["ball", "creature", "creature_distance", "creature_inside", "cube_tetrahedra", "sphere", "sphere_mesh"]

# A creature of capsules (start, end, radius), y up, nose along +x; left and right are mirrored in z.
_MIDDLE = [
    ((-0.45, 0.00, 0.0), (0.38, 0.05, 0.0), 0.23),  # body
    ((0.38, 0.10, 0.0), (0.60, 0.45, 0.0), 0.11),  # neck
    ((0.58, 0.50, 0.0), (0.80, 0.44, 0.0), 0.13),  # head
    ((0.80, 0.44, 0.0), (0.95, 0.38, 0.0), 0.07),  # snout
    ((-0.60, 0.10, 0.0), (-0.88, 0.42, 0.0), 0.05),  # tail
    ((-0.88, 0.42, 0.0), (-0.80, 0.62, 0.0), 0.04),
]
_SIDES = [
    ((0.30, -0.10, 0.15), (0.36, -0.62, 0.18), 0.08),  # fore leg
    ((-0.42, -0.08, 0.15), (-0.46, -0.62, 0.18), 0.09),  # hind leg
    ((0.55, 0.58, 0.08), (0.50, 0.78, 0.15), 0.04),  # ear
]
_BOX = torch.tensor([[-1.1, -0.8, -0.4], [1.1, 0.9, 0.4]])  # the creature lies in it


def creature_distance(points: Tensor) -> Tensor:
    """Signed distance (*batch,) of points (*batch, 3) to the creature, below 0 inside; its capsules blend smoothly.

    Example:
        >>> x = torch.linspace(-1.2, 1.2, 25)
        >>> mask = creature_distance(torch.stack(torch.meshgrid(x, x, x, indexing="ij"), dim=-1)) < 0
        >>> mask.shape
        torch.Size([25, 25, 25])
    """
    mirrored = [((x, y, -z), (u, v, -w), radius) for (x, y, z), (u, v, w), radius in _SIDES]
    distances = []
    for start, end, radius in [*_MIDDLE, *_SIDES, *mirrored]:
        a, b = points.new_tensor(start), points.new_tensor(end)
        along = (((points - a) @ (b - a)) / ((b - a) @ (b - a))).clamp(0, 1)
        distances.append((points - a - along[..., None] * (b - a)).norm(dim=-1) - radius)
    return -0.03 * torch.logsumexp(-torch.stack(distances) / 0.03, dim=0)


def creature(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """n points spread evenly over the surface of a four-legged creature of length 2, and their normals."""
    n, generator = _checks.integer("n", n, 1), torch.Generator().manual_seed(seed)
    low, high = _BOX
    parts, count = [], 0
    while count < n:
        # Points of a thin shell about the surface, moved onto it along the gradient: even up to curvature.
        points = low + (high - low) * torch.rand(min(8 * n, 2**20), 3, generator=generator)
        points = points[creature_distance(points).abs() < 0.02].requires_grad_()
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
