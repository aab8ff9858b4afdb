"""The kernel of an argument that is either points or a kernel."""

from typing import Any, TypedDict

from qattn._types import ArrayLike
from qattn.attention.api import BackendName
from qattn.distributed.group import GroupLike
from qattn.kernels.base import Kernel
from qattn.kernels.gaussian.kernel import GaussianKernel, MethodName
from qattn.kernels.oriented import OrientedKernel

__all__ = ["KernelOptions", "as_kernel"]


class KernelOptions(TypedDict, total=False):
    """Arguments of `GaussianKernel`, or of `OrientedKernel` if there are normals, besides points, sigma and tol."""

    method: MethodName
    backend: BackendName
    group: GroupLike
    normals: ArrayLike | None
    weight: ArrayLike


def as_kernel(
    points_or_kernel: ArrayLike | Kernel, sigma: ArrayLike | None, normals: ArrayLike | None = None, **options: Any
) -> Kernel:
    """Return a kernel unchanged, or make the Gaussian kernel of points with a bandwidth, and with normals if any."""
    if isinstance(points_or_kernel, Kernel):
        given = ["sigma"] * (sigma is not None) + ["normals"] * (normals is not None) + list(options)
        if given:
            extra = ", ".join(f"`{name}`" for name in given)
            raise ValueError(f"{extra} should not be given with a kernel. Set them when making the kernel.")
        return points_or_kernel
    if sigma is None:
        raise ValueError("`sigma` should be given with points: the bandwidth, in units of the points.")
    if normals is None:
        return GaussianKernel(points_or_kernel, sigma, **options)
    return OrientedKernel(points_or_kernel, normals, sigma, **options)
