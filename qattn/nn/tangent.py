r"""Gradients in the tangent planes of a cloud, as the sparse matrices gradX and gradY of DiffusionNet."""

import torch
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike

__all__ = ["tangent_gradients"]


def tangent_gradients(points: ArrayLike, *, num_neighbors: int = 30) -> tuple[Tensor, Tensor]:
    r"""Compute sparse matrices that map a function at points of a surface to the components of its gradient.

    The tangent plane at a point is spanned by the two principal directions of its neighbors. The gradient in it fits
    the differences to the neighbors by least squares with Gaussian weights. Each plane has a frame of its own, so only
    quantities that do not depend on it, such as lengths and angles between gradients, are meaningful.

    Args:
        points: Positions (N, 3) of one cloud.
        num_neighbors: Number of neighbors per point, at least 3.

    Returns:
        gradX and gradY, sparse tensors of shape (N, N).

    Examples:
        >>> points = torch.cat([torch.rand(500, 2), torch.zeros(500, 1)], dim=1)
        >>> grad_x, grad_y = tangent_gradients(points)
        >>> slope = points @ torch.tensor([3.0, 4.0, 0.0])
        >>> torch.hypot(grad_x @ slope, grad_y @ slope).round().unique()
        tensor([5.])
    """
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    x = _checks.one_cloud("points", points, (3,), least=4)
    N, count = len(x), min(_checks.integer("num_neighbors", num_neighbors, 3), len(x) - 1)
    _, near = cKDTree(x.detach().cpu().numpy()).query(x.detach().cpu().numpy(), count + 1)
    index = torch.from_numpy(near[:, 1:]).to(x.device)  # (N, k): without the point itself, unless points coincide
    edges = x.detach().double()[index] - x.detach().double()[:, None]  # (N, k, 3)
    squares = edges.square().sum(-1)
    weights = torch.exp(-squares / squares.mean(-1, keepdim=True).clamp(min=torch.finfo(squares.dtype).tiny))
    covariance = torch.einsum("nk,nki,nkj->nij", weights, edges, edges)
    frame = torch.linalg.eigh(covariance).eigenvectors[..., 1:].flip(-1)  # (N, 3, 2), the widest direction first
    flat = edges @ frame  # (N, k, 2)
    gram = torch.einsum("nk,nki,nkj->nij", weights, flat, flat)
    # Neighbors on a line, or in one place, do not determine other directions, along which the gradient is set to 0.
    solved = torch.linalg.pinv(gram, hermitian=True, rtol=1e-6) @ (weights[..., None] * flat).mT  # (N, 2, k)
    rows = torch.arange(N, device=x.device)
    indices = torch.stack([rows.repeat_interleave(count + 1), torch.cat([rows[:, None], index], dim=1).flatten()])

    def matrix(columns: Tensor) -> Tensor:
        values = torch.cat([-columns.sum(-1, keepdim=True), columns], dim=1).flatten()
        return torch.sparse_coo_tensor(indices, values.to(x.dtype), (N, N), check_invariants=False).coalesce()

    return matrix(solved[:, 0]), matrix(solved[:, 1])
