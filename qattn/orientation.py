r"""Normals of clouds, all on the same side of the surface, and how much of a row of the kernel comes from other sheets.

Each normal is the direction in which the nearest points spread least. Signs are carried along a tree: from i to j, the
normal is reflected in the plane halfway between them,

    n_i ↦ n_i − 2 (n_i · e) e,        e = (x_j − x_i) / ‖x_j − x_i‖,

which is exact along any circle. It therefore also carries normals around the edge of a thin sheet to its other side,
where they point the opposite way. The tree joins points whose normals agree most after that.
"""

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.kernels import GaussianKernel

__all__ = ["normals", "share_of_other_sheets"]

_NUM_ROUNDS = 2  # in which normals are taken anew, from points on the same side alone
_COST = 1e-3  # of an edge of the tree whose normals agree: SciPy takes 0 for no edge


def normals(points: ArrayLike, num_neighbors: int = 16) -> TensorOrArray:
    r"""Estimate normals of length 1 on the same side of the surface, and outwards if it is closed.

    Thin sheets, whose sides lie within reach of `num_neighbors` points, are oriented as two sides as far as the signs
    can be told. Open surfaces with corners, and points on no surface, have normals of some orientation.

    Args:
        points: Positions of one cloud, shape (N, 3), or (N, 2) for curves in the plane.
        num_neighbors: Number of points nearby that give each normal, at least 2: more for noisy points, fewer for thin
            parts.

    Returns:
        Normals (N, d), a tensor or an array as `points`.

    Examples:
        >>> points = torch.nn.functional.normalize(torch.randn(2000, 3), dim=-1)
        >>> bool(((normals(points) * points).sum(-1) > 0.9).all())
        True
    """
    tensor = _checks.one_cloud("points", points, (2, 3), least=3)
    num_neighbors = min(_checks.integer("num_neighbors", num_neighbors, 2), len(tensor) - 1)
    x = tensor.detach().cpu().double().numpy()
    found = _oriented(x - x.mean(0), num_neighbors)
    return like_input(torch.from_numpy(found).to(tensor), points)


def _oriented(x: np.ndarray, num_neighbors: int) -> np.ndarray:
    """Return normals (N, d) of points (N, d) whose mean is 0."""
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    far = cKDTree(x).query(x, min(2 * num_neighbors, len(x) - 1) + 1)[1]  # (N, K), itself first
    near = far[:, : num_neighbors + 1]
    n = _signed(x, _flattest(x, near, np.ones(near.shape)), near)
    for _ in range(_NUM_ROUNDS):
        same = np.einsum("na,nka->nk", n, n[far]) > 0
        same &= np.cumsum(same, 1) <= num_neighbors + 1
        n = _signed(x, _flattest(x, far, same.astype(float)), near)
    return n


def _flattest(x: np.ndarray, near: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return directions (N, d) in which points with indices and weights (N, K) spread least."""
    weight = weight / weight.sum(1, keepdims=True)
    apart = x[near] - np.einsum("nk,nka->na", weight, x[near])[:, None]
    return np.linalg.eigh((weight[..., None] * apart).transpose(0, 2, 1) @ apart)[1][..., 0]


def _carried(x: np.ndarray, n: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Compute the dot products (E,) of the normals at the ends of edges with those that are carried there."""
    edge = x[ends] - x[starts]
    squares = (edge**2).sum(1)
    along = (n[starts] * edge).sum(1) * (n[ends] * edge).sum(1)
    return (n[starts] * n[ends]).sum(1) - 2 * along / np.where(squares > 0, squares, 1)


def _signed(x: np.ndarray, n: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return normals with signs carried along a tree of neighbors (N, K), and outwards of each part of the cloud."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree

    N, K = near.shape
    # Older versions of SciPy walk graphs with indices of 32 bits alone.
    starts, ends = np.repeat(np.arange(N, dtype=np.int32), K - 1), near[:, 1:].ravel().astype(np.int32)
    cost = 1 + _COST - np.minimum(1, np.abs(_carried(x, n, starts, ends)))
    tree = minimum_spanning_tree(csr_array((cost, (starts, ends)), shape=(N, N)))
    num_parts, part = connected_components(tree, directed=False)
    roots = np.unique(part, return_index=True)[1]
    sign = np.ones(N)
    for root in roots:
        order, before = breadth_first_order(tree, root, directed=False)
        ends, starts = order[1:], before[order[1:]]
        is_kept = _carried(x, n, starts, ends) >= 0
        for end, start, keep in zip(ends.tolist(), starts.tolist(), is_kept.tolist(), strict=True):
            sign[end] = sign[start] if keep else -sign[start]
    n = sign[:, None] * n
    outward = np.bincount(part, (n * x).sum(1), num_parts)  # three times the volume, on closed surfaces
    return np.where(outward[part] < 0, -1, 1)[:, None] * n


def share_of_other_sheets(kernel: GaussianKernel, mass: Tensor, normals: Tensor) -> Tensor:
    r"""Compute Σ_j p_ij (c_ij² − c_ij) / 2 with c_ij = n_i · n_j and rows p: the share of opposite normals in a row.

    The summand is 1 for opposite normals, 0 for equal and perpendicular ones, and negative in between: rows that follow
    one bent sheet have no positive sum.

    Args:
        kernel: Gaussian kernel of one cloud, with one bandwidth.
        mass: Masses (N,).
        normals: Normals (N, d).

    Returns:
        Shares (N,) ≥ 0, averaged once over the same rows.
    """
    n, bias = normals.to(kernel.dtype), torch.log(mass)
    squares = (n[:, :, None] * n[:, None, :]).flatten(1)  # (N, d²)
    mean = kernel.attend(bias, torch.cat([n, squares], dim=1)).out
    assert mean is not None
    first, second = mean.split([n.shape[1], squares.shape[1]], dim=1)
    share = (0.5 * ((squares * second).sum(1) - (n * first).sum(1))).clamp(min=0)
    smooth = kernel.attend(bias, share[:, None]).out
    assert smooth is not None
    return smooth[:, 0]
