r"""The Chamfer distance: mean distances to nearest neighbors, in both directions."""

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.distances.inputs import two_clouds
from qattn.distances.neighbors import nearest_neighbors

__all__ = ["chamfer_distance"]


@eager
def chamfer_distance(source: ArrayLike, target: ArrayLike, power: float = 2) -> TensorOrArray:
    r"""Chamfer distance 1/N Σ_i min_j ‖x_i − y_j‖^{p} + 1/M Σ_j min_i ‖x_i − y_j‖^{p}.

    Points have no masses. Gradients hold the nearest neighbors fixed; coinciding points contribute 0 to them, although
    p < 2 has no derivative there.

    Args:
        source: Points x, shape (*batch, N, d).
        target: Points y, shape (*batch, M, d); batch axes broadcast.
        power: Exponent p > 0. With p = 2, as usual, outliers dominate; with p = 1, the distance is a length.

    Returns:
        Distances of shape (*batch,), an array if `source` is not a tensor.

    Examples:
        >>> chamfer_distance([[0.0, 0.0], [3.0, 0.0]], [[0.0, 4.0]])
        array(36.5)
        >>> chamfer_distance([[0.0, 0.0], [3.0, 0.0]], [[0.0, 4.0]], power=1)
        array(8.5)
    """
    x, y = two_clouds(source, target)
    _checks.positive("`power`", power)
    clouds = zip(x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True)
    distances = [_mean_distance(a, b, power) + _mean_distance(b, a, power) for a, b in clouds]
    return like_input(torch.stack(distances).reshape(x.shape[:-2]), source)


def _mean_distance(x: Tensor, y: Tensor, power: float) -> Tensor:
    """Return the mean of ‖x_i − y_j‖^{p} over points x (N, d), y_j the nearest of y (M, d)."""
    index = nearest_neighbors(x.detach().double(), y.detach().double())
    distances = torch.linalg.vector_norm(x - y[index], dim=-1)
    is_apart = distances > 0
    return torch.where(is_apart, torch.where(is_apart, distances, 1).pow(power), 0).mean()
