"""Spectra of points alone: bandwidth, masses, normals and the scale of frequencies follow from them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._types import ArrayLike, MassLike
from qattn.kernels import GaussianKernel, OrientedKernel
from qattn.mass import density
from qattn.operators.diffusion import diffusion
from qattn.orientation import normals as normals_of
from qattn.orientation import share_of_other_sheets
from qattn.spectra.bandwidth import measured_sigma
from qattn.spectra.eigensolver import eigsh
from qattn.spectra.spectrum import Spectrum

__all__ = ["spectrum"]

_NEAR, _FAR = 4, 16  # numbers of neighbors whose distances give the bandwidth and the dimension
_LOG_RATIO = 1.4849  # mean of d log(r_16 / r_4) of random points in d dimensions, ψ(16) − ψ(4)
_EVEN = 0.35  # spread of areas below which points are even: half of that of random points
_OTHER_SHEETS = 0.05  # share of a row from other sheets from which normals count fully
_FEW = 1e-3  # part of the points with such rows below which normals are not worth their passes
_FEWEST = 32  # points up to which normals are not estimated: `normals` looks at that many neighbors of each
_TOL = 1e-4  # of the normalization
_LOST = "nothing can be measured, as rows reach across the shape or no other point"


@dataclass(frozen=True)
class _Sampling:
    """Properties of a sampling that follow from distances to a few neighbors.

    Attributes:
        sigma: Mean distance r to the fourth neighbor, weighted by r^d, the area of a point, and divided by 1 + 1/4d.
            For random points of one density it is the plain mean; otherwise it suits the sparse parts.
        dims: Dimension d of the shape, by how distances grow with the number of neighbors; that of the space if there
            are too few of them.
        spread: Difference of the quartiles of the areas r^d, over their median; 0.70 for random points of one density
            in any dimension, more if the density varies, 0 for grids, whatever their boundary.
        has_growth: Whether there are enough neighbors to tell the dimension.
    """

    sigma: float
    dims: int
    spread: float
    has_growth: bool


@eager
@torch.no_grad()
def spectrum(
    points: ArrayLike,
    k: int,
    *,
    sigma: float | Literal["auto"] = "auto",
    mass: MassLike | Literal["auto"] | None = "auto",
    normals: ArrayLike | Literal["auto"] | None = "auto",
    **options: Any,
) -> Spectrum:
    r"""Compute k eigenpairs of the Laplacian of a shape from points on it, or in it.

    The result is that of `eigsh` for an operator that follows from the points. Its field `choices` says which, and why.

    Args:
        points: Positions of one cloud, shape (N, d).
        k: Number of eigenpairs.
        sigma: Bandwidth of the kernel; "auto" takes the mean distance to the fourth neighbor.
        mass: Masses (N,), None for equal ones, or "density" for those of `qattn.mass.density`. "auto" takes equal ones
            for points that are even, as on a grid, and else "density".
        normals: Normals (N, d) on the same side of the surface, None to do without, or "auto" to estimate them for
            surfaces in space. They only count where the rows of a Gaussian kernel reach other sheets; see
            `OrientedKernel`.
        **options: Further arguments of `eigsh`.

    Returns:
        A `Spectrum`, of arrays if the points are one. With masses by density, its `sigma` is `effective_sigma` of the
        operator, which corrects `frequencies` for random sampling; otherwise it is that of the kernel. If points are so
        few that rows reach across the shape, nothing can be measured, and masses are equal.

    Examples:
        >>> points = torch.nn.functional.normalize(torch.randn(2000, 3), dim=-1)
        >>> spectrum(points, 9).frequencies.round()  # 2 three times, 6 five times, on the unit sphere
        tensor([0., 2., 2., 2., 6., 6., 6., 6., 6.])
    """
    x = _checks.one_cloud("points", points, least=3)
    sampling = _sampling(x)
    choices = {}
    if isinstance(sigma, str):
        _checks.one_of("sigma", sigma, ("auto",))
        bandwidth = sampling.sigma
        choices["sigma"] = f"{bandwidth:.4g}, the mean distance to the fourth neighbor"
    else:
        bandwidth = float(_checks.one_bandwidth(sigma, torch.float64, torch.device("cpu")))
        choices["sigma"] = f"{bandwidth:.4g}, as given"
    choices["dimension"] = f"{sampling.dims}, " + (
        "by the growth of distances from the fourth to the sixteenth neighbor"
        if sampling.has_growth
        else "that of the space, as points are few"
    )
    gaussian = GaussianKernel(x, bandwidth, tol=_TOL)
    kernel, choices["normals"] = _with_normals(gaussian, normals, sampling)
    m, choices["mass"] = _mass(mass, sampling)
    q = diffusion(kernel, mass=m, tol=_TOL)
    scale = measured_sigma(q, kernel, sampling.dims) if isinstance(m, str) else None
    is_lost = isinstance(m, str) and scale is None
    if is_lost and mass == "auto":
        choices["mass"] = f"equal: {_LOST}"
        if isinstance(normals, str):
            kernel, choices["normals"] = gaussian, f"none: {_LOST}"
        q = diffusion(kernel, tol=_TOL)
    choices["frequencies"] = (
        f"by {bandwidth:.4g}, the bandwidth" if scale is None else f"by {scale:.4g}, the bandwidth as measured"
    ) + (f": {_LOST}" if is_lost else "")
    found = replace(eigsh(q, k, **options), sigma=bandwidth if scale is None else scale, choices=choices)
    return found if isinstance(points, Tensor) else found.numpy()


def _sampling(points: Tensor) -> _Sampling:
    """Measure distances to the fourth and the sixteenth distinct neighbor, as far as there are so many."""
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    x = np.unique(points.detach().cpu().double().numpy(), axis=0)
    if len(x) < 3:
        raise ValueError(f"`points` should have at least three distinct points; got {len(x)}.")
    near, far = min(_NEAR, len(x) - 1), min(_FAR, len(x) - 1)
    distance = cKDTree(x).query(x, far + 1)[0]
    first, second = distance[:, near], distance[:, far]
    growth = float(np.log(second / first).mean())
    # With fewer points than neighbors, nothing tells the dimension but the coordinates.
    has_growth = far == _FAR and growth > 0
    dims = min(x.shape[1], max(1, round(_LOG_RATIO / growth))) if has_growth else x.shape[1]
    areas = (first / first.mean()) ** dims
    sigma = np.average(first, weights=areas) / (1 + 1 / (4 * dims))
    low, median, high = np.quantile(areas, [0.25, 0.5, 0.75])
    return _Sampling(float(sigma), dims, float((high - low) / median), has_growth)


def _mass(mass: MassLike | None, sampling: _Sampling) -> tuple[MassLike | None, str]:
    """Return masses, or "density" for those of the kernel, and a note on why."""
    if not isinstance(mass, str):
        return mass, "equal, as given" if mass is None else "as given"
    _checks.one_of("mass", mass, ("auto", "density"))
    if mass == "density":
        return mass, "density, as given"
    areas = f"quartiles of areas differ by {sampling.spread:.0%}"
    if sampling.spread < _EVEN:
        return None, f"equal: points are even, {areas}"
    return "density", f"density: points are random or uneven, {areas}"


def _with_normals(
    kernel: GaussianKernel, normals: ArrayLike | Literal["auto"] | None, sampling: _Sampling
) -> tuple[GaussianKernel | OrientedKernel, str]:
    """Return the kernel, with normals if rows reach other sheets, and a note on why."""
    x = kernel.points
    if normals is None:
        return kernel, "none, as given"
    is_estimated = isinstance(normals, str)
    if isinstance(normals, str):
        _checks.one_of("normals", normals, ("auto",))
        if x.shape[-1] != 3 or sampling.dims != 2:
            return kernel, "none: not a surface in space"
        if len(x) <= _FEWEST:
            return kernel, "none: points are few"
        normals = normals_of(x)
    oriented = OrientedKernel(x, normals, kernel.sigma, tol=_TOL)  # checks the normals
    share = share_of_other_sheets(kernel, density(kernel), oriented.normals)
    part = float((share > _OTHER_SHEETS).double().mean())
    where = f"at {part:.1%} of the points, over {_OTHER_SHEETS:.0%} of a row are of other sheets"
    if part < _FEW:
        return kernel, f"not needed: {where}"
    weight = (share / _OTHER_SHEETS).clamp(max=1).sqrt()
    oriented = OrientedKernel(x, normals, kernel.sigma, weight=weight, tol=_TOL)
    return oriented, f"{'estimated' if is_estimated else 'as given'}: {where}"
