r"""Bandwidths that suit a cloud: from a few spacings of its points to a part of its extent.

| | |
|---|---|
| `spacing` | mean distance from a point to the nearest other one |
| `sigma_range` | from 2 spacings to a tenth of the extent |
| `num_neighbors` | 1 / Q_ii, the number of points over which Q spreads point i |

With a bandwidth far below the spacing, Q is the identity up to rounding, and no error or warning tells, because its
rows sum to one. `num_neighbors` is then 1.
"""

import numpy as np
import torch

from qattn import _checks
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.kernels import GaussianKernel
from qattn.operators.diffusion import Diffusion

__all__ = ["num_neighbors", "sigma_range", "spacing"]

_MAX_DENSE = 2_000  # points for which all distances are computed faster than SciPy is imported
_MAX_QUERIES = 10_000  # points whose nearest neighbor is searched


def spacing(points: ArrayLike) -> float:
    """Compute the mean distance from a point to the nearest distinct one, over at most 10,000 points.

    Args:
        points: Positions of one cloud, shape (N, d).

    Returns:
        The mean, or 0 if all points coincide.

    Examples:
        >>> spacing(torch.arange(5.0)[:, None])
        1.0
    """
    distinct = np.unique(_one_cloud(points), axis=0)
    if len(distinct) == 1:
        return 0.0
    if len(distinct) <= _MAX_DENSE:
        x = torch.from_numpy(distinct)
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
        return float(distances.amin(1).mean())
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    queries = distinct[:: -(-len(distinct) // _MAX_QUERIES)]
    return float(cKDTree(distinct).query(queries, 2)[0][:, 1].mean())


def sigma_range(points: ArrayLike) -> tuple[float, float]:
    """Suggest bandwidths, from 2 spacings to a tenth of the diagonal of the box.

    Below, Q connects a point with few others and depends on the sampling. Above, it sees the space around the shape
    rather than the shape.

    Args:
        points: Positions of one cloud, shape (N, d), at least two of them distinct.

    Returns:
        The smallest and the largest. Both are 2 spacings if the cloud is too coarse for others.

    Examples:
        >>> low, high = sigma_range(torch.linspace(0, 1, 101)[:, None])
        >>> round(low, 3), round(high, 3)
        (0.02, 0.1)
    """
    x = _one_cloud(points)
    low, high = 2 * spacing(x), 0.1 * float(np.linalg.norm(np.ptp(x, axis=0)))
    if low == 0:
        raise ValueError("`points` should have at least two distinct points, because bandwidths follow from distances.")
    return low, max(low, high)


def num_neighbors(q: Diffusion) -> TensorOrArray:
    r"""Compute 1 / Q_ii = 1 / (m_i e^{l_i + r_i}), the number of points over which Q spreads point i.

    On a surface with evenly spread points it is the number of points in a disk of radius √2 σ. At 1, Q is the identity.

    Args:
        q: Operator with a Gaussian kernel.

    Returns:
        Numbers of shape (*batch, N), an array if the operator was made from one; ∞ at points without mass.

    Examples:
        >>> q = diffusion(torch.arange(5.0)[:, None], sigma=1e-3)
        >>> num_neighbors(q)  # Q is the identity
        tensor([1., 1., 1., 1., 1.])
    """
    if not isinstance(q.kernel, GaussianKernel):
        raise ValueError(f"`num_neighbors` needs a `GaussianKernel`; got {type(q.kernel).__name__}.")
    left = torch.as_tensor(q.potential, device=q.device)
    return like_input(torch.exp(-left - q.bias), q.mass)


def _one_cloud(points: ArrayLike) -> np.ndarray:
    return _checks.one_cloud("points", points).detach().cpu().double().numpy()
