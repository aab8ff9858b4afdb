r"""Masses of points: the share of a shape that each point represents.

| | m_i | sum |
|---|---|---|
| `vertex_areas` | 1/3 Σ_{T∋i} area(T) over triangles | area |
| `vertex_volumes` | 1/4 Σ_{T∋i} volume(T) over tetrahedra | volume |
| `density` | such that Σ_j K_ij m_j is nearly the same for all i | 1 |
| `voxel_density` | the same for voxels, with a Gaussian of 3 voxels | 1 |

A normalized operator does not depend on the scale of its masses, so areas and volumes are not scaled.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._eager import eager
from qattn._meshes import check_simplices
from qattn._types import ArrayLike, MassLike, TensorOrArray, like_input
from qattn.kernels import Kernel, VoxelKernel
from qattn.kernels.of_points import KernelOptions, as_kernel

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which comes with torch

__all__ = ["density", "mass_of", "vertex_areas", "vertex_volumes", "voxel_density"]

_VOXEL_SIGMA = 3.0  # voxels, as in appendix G of the paper


class _Options(KernelOptions, total=False):
    tol: float


def vertex_areas(vertices: ArrayLike, faces: ArrayLike) -> TensorOrArray:
    r"""Compute m_i = 1/3 Σ_{T∋i} area(T): each triangle gives a third of its area to each corner.

    Args:
        vertices: Positions of shape (*batch, N, 3), or (*batch, N, 2) in the plane.
        faces: Vertex indices of the triangles, integers of shape (F, 3), the same for the whole batch.

    Returns:
        Masses of shape (*batch, N) that sum to the area of the mesh, a tensor or an array as `vertices`. They are
        differentiable with respect to the vertices; triangles without area contribute nothing.

    Examples:
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> vertex_areas(square, [[0, 1, 2], [0, 2, 3]])
        tensor([0.3333, 0.1667, 0.3333, 0.1667])
    """
    x = _checks.points("vertices", vertices, (2, 3))
    faces = check_simplices("faces", faces, 3, x)
    if x.shape[-1] == 2:
        x = torch.nn.functional.pad(x, (0, 1))
    a, b, c = _at_corners(x, faces)  # (*batch, F, 3)
    first, second = b - a, c - a
    # In units of its own edges, a triangle of any size has squares that float32 holds.
    size = torch.maximum(first.detach().abs().amax(-1), second.detach().abs().amax(-1))[..., None]
    size = torch.where(size > 0, size, 1)
    areas = 0.5 * torch.linalg.vector_norm(torch.linalg.cross(first / size, second / size), dim=-1)
    areas = areas * size[..., 0] * size[..., 0]
    return like_input(_distribute(areas, faces, x), vertices)


def vertex_volumes(vertices: ArrayLike, tetrahedra: ArrayLike) -> TensorOrArray:
    r"""Compute m_i = 1/4 Σ_{T∋i} volume(T): each tetrahedron gives a quarter of its volume to each corner.

    Args:
        vertices: Positions of shape (*batch, N, 3).
        tetrahedra: Vertex indices, integers of shape (F, 4), in either orientation, the same for the whole batch.

    Returns:
        Masses of shape (*batch, N) that sum to the volume of the mesh, a tensor or an array as `vertices`. They are
        differentiable with respect to the vertices.

    Examples:
        >>> corners = torch.cat([torch.zeros(1, 3), torch.eye(3)])
        >>> vertex_volumes(corners, [[0, 1, 2, 3]]).sum()
        tensor(0.1667)
    """
    x = _checks.points("vertices", vertices, (3,))
    tetrahedra = check_simplices("tetrahedra", tetrahedra, 4, x)
    a, b, c, d = _at_corners(x, tetrahedra)  # (*batch, F, 3)
    volumes = (torch.linalg.cross(b - a, c - a) * (d - a)).sum(-1).abs() / 6
    return like_input(_distribute(volumes, tetrahedra, x), vertices)


@eager
def density(
    points_or_kernel: ArrayLike | Kernel,
    sigma: ArrayLike | None = None,
    *,
    num_iter: int = 4,
    **kernel: "Unpack[_Options]",
) -> TensorOrArray:
    r"""Compute masses for which Σ_j K_ij m_j is nearly constant, by m ← m / (K m): less mass where points are dense.

    The first iteration gives m_i = 1 / Σ_j K_ij, a density at the scale of the kernel. The others sharpen it, to scales
    at which random points are clumps and gaps. In the limit K diag(m) is a diffusion without any normalization.

    Args:
        points_or_kernel: Points of shape (*batch, N, d), or a `Kernel`.
        sigma: Bandwidth of the Gaussian kernel of points, a number or shape (H,) for H heads. Take a few spacings of
            the points: with less, points have no neighbors; with much more, masses depend on the shape instead of its
            sampling.
        num_iter: Number of iterations, each of one kernel pass.
        **kernel: Further arguments of `GaussianKernel`, or `normals` and further arguments of `OrientedKernel`.

    Returns:
        Masses of shape (*batch, N), or (*batch, H, N) with heads: an array if the points are one, else a tensor.

    Examples:
        >>> density([[0.0], [0.0], [9.0]], sigma=1.0)  # two points at one place share its mass
        array([0.25, 0.25, 0.5 ])
    """
    k = as_kernel(points_or_kernel, sigma, **kernel)
    log_mass = torch.zeros(k.shape[:-2] + k.shape[-1:], dtype=k.dtype, device=k.device)
    for count in range(_checks.integer("num_iter", num_iter, 1)):
        lse = k.attend(log_mass).lse
        if count == 0:
            _check_row_sums(lse, k)
        log_mass = log_mass - lse
    mass = torch.exp(log_mass - k.ranks.log_sum(torch.logsumexp(log_mass, dim=-1))[..., None])
    return mass if isinstance(points_or_kernel, Kernel) else like_input(mass, points_or_kernel)


def mass_of(mass: MassLike | None, kernel: Kernel) -> Tensor:
    """Convert masses to a tensor (*batch, N): those of the kernel, of shape (*batch, N, N), if None."""
    if isinstance(mass, str):
        _checks.one_of("mass", mass, ("density",))
        return density(kernel)
    return _checked_mass(kernel.mass if mass is None else mass, kernel)


def _checked_mass(numbers: ArrayLike | None, kernel: Kernel) -> Tensor:
    """Convert masses ≥ 0 to a tensor that broadcasts to (*batch, N), for a kernel (*batch, N, N); 1/N if None."""
    shape, N = kernel.shape, kernel.shape[-1]
    if numbers is None:
        return torch.full((N,), 1 / N, dtype=kernel.dtype, device=kernel.device)
    tensor = _checks.floating("mass", kernel.ranks.local_part("mass", numbers, -1)).to(kernel.device, kernel.dtype)
    if tensor.ndim == 0 or tensor.shape[-1] != N:
        raise ValueError(
            f"`mass` should have shape {(*shape[:-2], N)}, one mass per point, or one that broadcasts to it; "
            f"got {_checks.shape_of(tensor)}. Leave it out for equal masses."
        )
    try:
        fits = broadcast_shapes(tensor.shape[:-1], shape[:-2]) == shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"`mass` should broadcast to the shape {(*shape[:-2], N)} of the points; got {_checks.shape_of(tensor)}. "
            "With heads, masses of a batch need a head axis: `mass[..., None, :]`."
        )
    _checks.finite("mass", tensor, "Use 0 for points without mass.")
    if (tensor < 0).any():
        raise ValueError(
            f"`mass` should not be negative; {int((tensor < 0).sum())} of its {tensor.numel()} numbers are."
        )
    if (kernel.ranks.total(tensor.detach()) == 0).any():
        raise ValueError("`mass` should have a positive sum in each cloud; it is all 0 in at least one.")
    return tensor


def voxel_density(mask: ArrayLike) -> TensorOrArray:
    r"""Compute m_i = 1 / Σ_j K_ij over occupied voxels, scaled to sum 1, with a Gaussian kernel of 3 voxels.

    The number of voxels per area of a surface depends on its direction in the grid; the density corrects for this.

    Args:
        mask: Grid with 1, 2 or 3 axes, dense or sparse, as for `VoxelKernel`; only the occupied voxels matter.

    Returns:
        Masses of shape (N,) of the occupied voxels, in the order of `VoxelKernel`.

    Examples:
        >>> voxel_density(torch.ones(3, dtype=torch.bool))
        tensor([0.3390, 0.3220, 0.3390])
    """
    return like_input(density(VoxelKernel(mask, _VOXEL_SIGMA), num_iter=1), mask)


def _at_corners(vertices: Tensor, simplices: Tensor) -> tuple[Tensor, ...]:
    """Return the positions (*batch, F, d) of each corner of simplices (F, corners), in float32 or better."""
    x = vertices.to(torch.promote_types(vertices.dtype, torch.float32))
    return x[..., simplices, :].unbind(-2)


def _distribute(sizes: Tensor, simplices: Tensor, vertices: Tensor) -> Tensor:
    """Distribute sizes (*batch, F) equally to the corners of simplices (F, corners): masses (*batch, N)."""
    F, num_corners = simplices.shape
    parts = (sizes / num_corners)[..., None].expand(*sizes.shape, num_corners)
    mass = sizes.new_zeros(vertices.shape[:-1])
    return mass.index_add(-1, simplices.reshape(-1), parts.reshape(*sizes.shape[:-1], F * num_corners))


def _check_row_sums(lse: Tensor, kernel: Kernel) -> None:
    """Check, over all ranks, that no row sum exp(lse) is 0."""
    counts = torch.tensor([int((lse == -torch.inf).sum()), lse.numel()], device=lse.device)
    num_zeros, num_rows = kernel.ranks.sum(counts).tolist()
    if num_zeros:
        raise ValueError(
            f"Each row of the kernel should have a positive sum; {num_zeros} of {num_rows} are 0. Remove those sites, "
            "or give them a similarity to themselves."
        )
