r"""Gradients in the tangent planes of a cloud, as the sparse matrices gradX, gradY of DiffusionNet."""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks

__all__ = ["tangent_gradients"]


def tangent_gradients(points: Any, *, neighbours: int = 30) -> tuple[Tensor, Tensor]:
    r"""Sparse matrices (N, N) that take a function at points of a surface to the components of its gradient.

    The tangent plane at a point is that of the two widest directions of its neighbours, and the gradient the one that
    explains the differences to them best, by least squares with Gaussian weights. Each plane has a frame of its own:
    only what does not depend on it, such as lengths and angles between gradients, has a meaning.

    Args:
        points: Positions (N, 3) of one cloud.
        neighbours: How many neighbours each point looks at.

    Example:
        >>> points = torch.cat([torch.rand(500, 2), torch.zeros(500, 1)], dim=1)
        >>> grad_x, grad_y = tangent_gradients(points)
        >>> slope = points @ torch.tensor([3.0, 4.0, 0.0])
        >>> torch.hypot(grad_x @ slope, grad_y @ slope).round().unique()
        tensor([5.])
    """
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    x = _checks.one_cloud(points, 3, least=4)
    N, count = len(x), min(_checks.integer("neighbours", neighbours, 3), len(x) - 1)
    _, near = cKDTree(x.detach().cpu().numpy()).query(x.detach().cpu().numpy(), count + 1)
    index = torch.from_numpy(near[:, 1:]).to(x.device)  # (N, k): all but, unless points coincide, itself
    edges = x.detach().double()[index] - x.detach().double()[:, None]  # (N, k, 3)
    squares = edges.square().sum(-1)
    weights = torch.exp(-squares / squares.mean(-1, keepdim=True).clamp(min=torch.finfo(squares.dtype).tiny))
    covariance = torch.einsum("nk,nki,nkj->nij", weights, edges, edges)
    frame = torch.linalg.eigh(covariance).eigenvectors[..., 1:].flip(-1)  # (N, 3, 2), the widest direction first
    flat = edges @ frame  # (N, k, 2)
    gram = torch.einsum("nk,nki,nkj->nij", weights, flat, flat)
    # Neighbours on a line, or all in one place, tell nothing of other directions: the gradient there is 0.
    solved = torch.linalg.pinv(gram, hermitian=True, rtol=1e-6) @ (weights[..., None] * flat).mT  # (N, 2, k)
    rows = torch.arange(N, device=x.device)
    indices = torch.stack([rows.repeat_interleave(count + 1), torch.cat([rows[:, None], index], dim=1).flatten()])

    def matrix(columns: Tensor) -> Tensor:
        values = torch.cat([-columns.sum(-1, keepdim=True), columns], dim=1).flatten()
        return torch.sparse_coo_tensor(indices, values.to(x.dtype), (N, N), check_invariants=False).coalesce()

    return matrix(solved[:, 0]), matrix(solved[:, 1])
