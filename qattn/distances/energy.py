r"""The Energy Distance of two clouds.

A cloud x with masses a of sum 1 is the measure μ = Σ a_i δ(x_i). The Energy Distance of two such measures,

    E(μ, ν) = Σ a_i b_j ‖x_i − y_j‖ − ½ Σ a_i a_j ‖x_i − x_j‖ − ½ Σ b_i b_j ‖y_i − y_j‖,

is 0 if they are equal and positive otherwise, for any numbers of points (Rizzo and Székely 2016).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qattn._eager import eager
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.distances.inputs import normalized_mass, two_clouds
from qattn.distances.sums import distance_sums

__all__ = ["energy_distance"]


@eager
def energy_distance(
    source: ArrayLike,
    target: ArrayLike,
    source_mass: ArrayLike | None = None,
    target_mass: ArrayLike | None = None,
) -> TensorOrArray:
    r"""Energy Distance E(μ, ν) = Σ a_i b_j ‖x_i − y_j‖ − ½ Σ a_i a_j ‖x_i − x_j‖ − ½ Σ b_i b_j ‖y_i − y_j‖.

    It takes (N + M)² distances and O(N + M) memory, including its gradients

        ∂E/∂x_i = a_i (Σ_j b_j (x_i − y_j) / ‖x_i − y_j‖ − Σ_j a_j (x_i − x_j) / ‖x_i − x_j‖),

    to which coinciding points contribute 0. It is differentiable once, in points and masses.

    Args:
        source: Points x, shape (*batch, N, d).
        target: Points y, shape (*batch, M, d); batch axes broadcast.
        source_mass: Masses a ≥ 0, shape (*batch, N), which are divided by their sum; equal by default.
        target_mass: Masses b ≥ 0, shape (*batch, M), which are divided by their sum; equal by default.

    Returns:
        Distances of shape (*batch,), an array if `source` is not a tensor.

    Examples:
        >>> energy_distance(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor(5.)
    """
    x, y = two_clouds(source, target)
    a, b = normalized_mass("source_mass", source_mass, x), normalized_mass("target_mass", target_mass, y)
    return like_input(_EnergyDistance.apply(torch.cat([x, y], dim=-2), torch.cat([a, -b], dim=-1)), source)


class _EnergyDistance(torch.autograd.Function):
    """−½ Σ w_i w_j ‖z_i − z_j‖ for both clouds as one z, (*batch, N + M, d), with negative masses w in the second."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        u, g = distance_sums(z, z, w)
        ctx.save_for_backward(w, u, g)
        return (-0.5 * (w * u).sum(-1)).to(w.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        w, u, g = ctx.saved_tensors
        grad_w = -gradient[..., None] * u
        return (-(gradient[..., None] * w)[..., None] * g).to(w.dtype), grad_w.to(w.dtype)
