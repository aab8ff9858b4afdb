"""Exact nearest neighbors between two clouds."""

import torch
from torch import Tensor

__all__ = ["nearest_neighbors"]

# In higher dimensions trees visit most of their leaves, unless the clouds nearly coincide, and products are faster.
_MAX_TREE_DIMS = 20
_MAX_DISTANCES = 2**22  # in memory at a time, but at least 16 rows of them


def nearest_neighbors(queries: Tensor, points: Tensor) -> Tensor:
    """Return the index of the nearest of `points` (N, d) for each of `queries` (M, d), shape (M,)."""
    if points.shape[1] <= _MAX_TREE_DIMS and points.device.type == "cpu":
        from scipy.spatial import cKDTree  # here, because SciPy is slow to import

        _, index = cKDTree(points.numpy()).query(queries.numpy(), workers=torch.get_num_threads())
        return torch.from_numpy(index).long()
    half_squares = points.square().sum(1) / 2
    chunks = queries.split(max(16, _MAX_DISTANCES // len(points)))
    return torch.cat([torch.addmm(half_squares, chunk, points.T, alpha=-1).argmin(1) for chunk in chunks])
