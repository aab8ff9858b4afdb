"""The nearest point of another cloud."""

import torch
from torch import Tensor

__all__ = ["nearest"]

# With more axes, trees visit most of their leaves unless the clouds are nearly the same, and products are faster.
_TREE_AXES = 20
_AT_ONCE = 2**22  # distances that are held at once, but at least 16 rows of them


def nearest(queries: Tensor, points: Tensor) -> Tensor:
    """The nearest of points (N, d) to each of queries (M, d): numbers (M,)."""
    if points.shape[1] <= _TREE_AXES and points.device.type == "cpu":
        from scipy.spatial import cKDTree  # here, because SciPy is slow to import

        _, index = cKDTree(points.numpy()).query(queries.numpy(), workers=torch.get_num_threads())
        return torch.from_numpy(index).long()
    half = points.square().sum(1) / 2
    chunks = queries.split(max(16, _AT_ONCE // len(points)))
    return torch.cat([torch.addmm(half, some, points.T, alpha=-1).argmin(1) for some in chunks])
