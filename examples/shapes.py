"""Shapes the examples are made of: generated, so that nothing needs to be downloaded."""

import torch
from torch import Tensor

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


def _distance(points: Tensor) -> Tensor:
    """Signed distance to the creature, the capsules blended smoothly."""
    mirrored = [tuple((x, y, -z) for x, y, z in capsule[:2]) + capsule[2:] for capsule in _SIDES]
    distances = []
    for start, end, radius in [*_MIDDLE, *_SIDES, *mirrored]:
        a, b = points.new_tensor(start), points.new_tensor(end)
        along = (((points - a) @ (b - a)) / ((b - a) @ (b - a))).clamp(0, 1)
        distances.append((points - a - along[:, None] * (b - a)).norm(dim=-1) - radius)
    return -0.03 * torch.logsumexp(-torch.stack(distances) / 0.03, dim=0)


def creature(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """n points spread evenly over the surface of a four-legged creature of length 2, and their normals."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([-1.1, -0.8, -0.4]), torch.tensor([1.1, 0.9, 0.4])
    parts, count = [], 0
    while count < n:
        # Points of a thin shell about the surface, moved onto it along the gradient: even up to curvature.
        points = low + (high - low) * torch.rand(min(8 * n, 2**20), 3, generator=generator)
        points = points[_distance(points).abs() < 0.02].requires_grad_()
        for _ in range(3):
            distance = _distance(points)
            (gradient,) = torch.autograd.grad(distance.sum(), points)
            points = (points - distance[:, None] * gradient / gradient.square().sum(-1, keepdim=True)).detach()
            points.requires_grad_()
        parts.append(points.detach())
        count += len(points)
    found = torch.cat(parts)
    normals = []
    for some in found[:n].split(2**18):
        some = some.clone().requires_grad_()
        normals.append(torch.autograd.grad(_distance(some).sum(), some)[0])
    return found[:n], torch.nn.functional.normalize(torch.cat(normals), dim=-1)
