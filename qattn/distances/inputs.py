"""Checked inputs: two clouds with a common batch shape, and their masses."""

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._types import ArrayLike

__all__ = ["normalized_mass", "two_clouds"]


def two_clouds(source: ArrayLike, target: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return points (*batch, N, d) and (*batch, M, d) with a common batch shape and dtype."""
    x, y = _checks.points("source", source), _checks.points("target", target)
    shapes = _checks.shape_of(x), _checks.shape_of(y)
    if y.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"`target` should have as many coordinates as `source` {shapes[0]}: shape (*batch, M, {x.shape[-1]}); "
            f"got {shapes[1]}."
        )
    if y.device != x.device:
        raise ValueError(
            f"`target` should be on the device of `source`, {x.device}; got {y.device}. "
            "Move it with `target.to(source.device)`."
        )
    try:
        batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"The batch axes should broadcast to one shape; got `source` {shapes[0]}, `target` {shapes[1]}."
        ) from None
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype).expand(*batch, -1, -1), y.to(dtype).expand(*batch, -1, -1)


def normalized_mass(name: str, mass: ArrayLike | None, points: Tensor) -> Tensor:
    """Return masses (*batch, N) ≥ 0 of points (*batch, N, d), divided by their sum; 1/N each by default."""
    shape, N = points.shape[:-1], points.shape[-2]
    if mass is None:
        return points.new_full(shape, 1 / N)
    tensor = _checks.floating(name, mass).to(points.device, points.dtype)
    if tensor.shape not in (shape, shape[-1:]):
        raise ValueError(
            f"`{name}` should have shape {tuple(shape)}, one mass per point; got {_checks.shape_of(tensor)}. "
            "Leave it out for equal masses."
        )
    _checks.finite(name, tensor, "Points without mass get 0.")
    if (tensor < 0).any() or (tensor.sum(-1) == 0).any():
        raise ValueError(f"`{name}` should be 0 or more, with a positive sum in each cloud.")
    return (tensor / tensor.sum(-1, keepdim=True)).expand(shape)
