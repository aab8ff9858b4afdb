r"""Masses of points: how much of a shape each of them stands for.

| | m_i | sums to |
|---|---|---|
| `uniform` | 1 / N | 1 |
| `vertex_areas` | 1/3 Σ_{T∋i} area(T) over triangles | the area |
| `vertex_volumes` | 1/4 Σ_{T∋i} volume(T) over tetrahedra | the volume |
| `density` | 1 / Σ_j K_ij, scaled | 1 |
| `voxel_density` | the same for voxels, with a Gaussian of 3 voxels | 1 |

A normalised operator does not depend on the scale of its masses, so areas and volumes are left as they are.
"""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn.kernels import GaussianKernel, Kernel, VoxelKernel

__all__ = ["density", "uniform", "vertex_areas", "vertex_volumes", "voxel_density"]

_VOXELS = 3.0  # the bandwidth of the paper, appendix G


def uniform(points: Any) -> Any:
    """m_i = 1 / N, shape (*batch, N), for points (*batch, N, d).

    Example:
        >>> uniform(torch.randn(4, 3))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    x = _checks.points("points", points)
    mass = x.new_full(x.shape[:-1], 1 / x.shape[-2], dtype=_dtype(x))
    return mass if isinstance(points, Tensor) else mass.numpy(force=True)


def vertex_areas(vertices: Any, faces: Any) -> Any:
    r"""m_i = 1/3 Σ_{T∋i} area(T), shape (*batch, N): each triangle gives a third of its area to each corner.

    Args:
        vertices: Positions of shape (*batch, N, 3), or (*batch, N, 2) in the plane.
        faces: The corners of the triangles, integers of shape (F, 3), the same for the whole batch.

    Returns:
        Masses that sum to the area of the mesh, differentiable by the vertices; triangles without area add nothing.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> vertex_areas(square, [[0, 1, 2], [0, 2, 3]])
        tensor([0.3333, 0.1667, 0.3333, 0.1667])
    """
    x = _checks.points("vertices", vertices, (2, 3))
    faces = _checks.simplices("faces", faces, 3, x)
    if x.shape[-1] == 2:
        x = torch.nn.functional.pad(x, (0, 1))
    a, b, c = x.to(_dtype(x))[..., faces, :].unbind(-2)  # (*batch, F, 3)
    first, second = b - a, c - a
    # In units of its own edges, a triangle of any size has squares that float32 holds.
    size = torch.maximum(first.detach().abs().amax(-1), second.detach().abs().amax(-1))[..., None]
    size = torch.where(size > 0, size, 1)
    areas = 0.5 * torch.linalg.vector_norm(torch.linalg.cross(first / size, second / size), dim=-1)
    areas = areas * size[..., 0] * size[..., 0]
    mass = _shared(areas, faces, x)
    return mass if isinstance(vertices, Tensor) else mass.numpy(force=True)


def vertex_volumes(vertices: Any, tetrahedra: Any) -> Any:
    r"""m_i = 1/4 Σ_{T∋i} volume(T), shape (*batch, N): each tetrahedron gives a quarter of its volume to each corner.

    Args:
        vertices: Positions of shape (*batch, N, 3).
        tetrahedra: Their corners, integers of shape (F, 4), in either orientation, the same for the whole batch.

    Returns:
        Masses that sum to the volume of the mesh, differentiable by the vertices.

    Example:
        >>> corners = torch.cat([torch.zeros(1, 3), torch.eye(3)])
        >>> vertex_volumes(corners, [[0, 1, 2, 3]]).sum()
        tensor(0.1667)
    """
    x = _checks.points("vertices", vertices, (3,))
    tetrahedra = _checks.simplices("tetrahedra", tetrahedra, 4, x)
    a, b, c, d = x.to(_dtype(x))[..., tetrahedra, :].unbind(-2)  # (*batch, F, 3)
    volumes = (torch.linalg.cross(b - a, c - a) * (d - a)).sum(-1).abs() / 6
    mass = _shared(volumes, tetrahedra, x)
    return mass if isinstance(vertices, Tensor) else mass.numpy(force=True)


@eager
def density(points_or_kernel: Any, sigma: Any = None, **kernel: Any) -> Any:
    r"""m_i = 1 / Σ_j K_ij, scaled to sum 1: where points are dense, each stands for less.

    Args:
        points_or_kernel: Points of shape (*batch, N, d), a tensor or an array, or a `Kernel`.
        sigma: The bandwidth of the Gaussian kernel, a number or (H,) for one head each; only with points. A few
            spacings of the points: fewer see no neighbours, many more see the shape instead of its sampling.
        **kernel: Further arguments of `GaussianKernel`.

    Returns:
        Masses of shape (*batch, N), (*batch, H, N) with heads.

    Example:
        >>> density([[0.0], [0.0], [9.0]], sigma=1.0)  # two points in one place share its mass
        array([0.25, 0.25, 0.5 ])
    """
    k: Kernel = _checks.kernel_of(points_or_kernel, sigma, kernel, Kernel, GaussianKernel)
    lse = k.attend(torch.zeros(k.shape[:-2] + k.shape[-1:], dtype=k.dtype, device=k.device)).lse
    _checks.positive_rows(lse, k.ranks)
    mass = torch.exp(-lse - k.ranks.log_sum(torch.logsumexp(-lse, dim=-1))[..., None])
    return mass if isinstance(points_or_kernel, (Kernel, Tensor)) else mass.numpy(force=True)


def voxel_density(mask: Any) -> Any:
    r"""m_i = 1 / Σ_j K_ij over occupied voxels, scaled to sum 1, with a Gaussian kernel of 3 voxels.

    A surface meets more voxels where it runs along the diagonals of the grid than along its axes; this evens it out.

    Args:
        mask: As of `VoxelKernel`: a grid with 1, 2 or 3 axes, dense or sparse; only what is occupied counts.

    Returns:
        Masses of shape (N,), of the occupied voxels in the order of `VoxelKernel`.

    Example:
        >>> voxel_density(torch.ones(3, dtype=torch.bool))
        tensor([0.3390, 0.3220, 0.3390])
    """
    mass = density(VoxelKernel(mask, _VOXELS))
    return mass if isinstance(mask, Tensor) else mass.numpy(force=True)


def _dtype(points: Tensor) -> torch.dtype:
    return torch.promote_types(points.dtype, torch.float32)


def _shared(sizes: Tensor, simplices: Tensor, vertices: Tensor) -> Tensor:
    """Sizes (*batch, F), a part to each corner of simplices (F, corners): (*batch, N)."""
    F, corners = simplices.shape
    parts = (sizes / corners)[..., None].expand(*sizes.shape, corners).reshape(*sizes.shape[:-1], F * corners)
    mass = sizes.new_zeros(vertices.shape[:-1])
    return mass.index_add(-1, simplices.reshape(-1), parts)
