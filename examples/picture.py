"""A camera, a light, and pictures of clouds too large to scatter."""

import math

import torch
from torch import Tensor


def seen(points: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """Points and normals as seen from the side and a little above: x right, y up, z towards the eye."""
    turn, tilt = math.radians(-35), math.radians(15)
    around = torch.tensor([[math.cos(turn), 0, -math.sin(turn)], [0, 1, 0], [math.sin(turn), 0, math.cos(turn)]])
    down = torch.tensor([[1, 0, 0], [0, math.cos(tilt), -math.sin(tilt)], [0, math.sin(tilt), math.cos(tilt)]])
    camera = (down @ around).T
    return points @ camera, normals @ camera


def light(normals: Tensor) -> Tensor:
    """How bright a surface is, shape (N, 1), for normals as they are seen."""
    return (0.45 + 0.6 * (normals @ torch.tensor([0.35, 0.65, 0.68])).clamp(min=0))[:, None]


def render(points: Tensor, normals: Tensor, colours: Tensor, width: int = 700) -> Tensor:
    """An image (height, width, 3) in which each pixel shows the nearest of the points (N, 3), 2 × 2 pixels each."""
    view, facing = seen(points, normals)
    low, high = view[:, :2].amin(0), view[:, :2].amax(0)
    scale = (width - 2) / float(high[0] - low[0])
    height = int(scale * float(high[1] - low[1])) + 2
    column, row = ((view[:, :2] - low) * scale).long().unbind(-1)
    order = torch.argsort(view[:, 2])  # the nearest is written last
    corner = ((height - 2 - row) * width + column)[order]
    last = torch.full((height * width,), -1)
    for offset in (0, 1, width, width + 1):
        last = last.scatter_reduce(0, corner + offset, torch.arange(len(corner)), "amax")
    image = torch.ones(height, width, 3)
    image.view(-1, 3)[last >= 0] = (colours * light(facing))[order[last[last >= 0]]].clamp(0, 1)
    return image
