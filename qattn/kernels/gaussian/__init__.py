"""The Gaussian kernel of points, local or sharded over processes, with the cheapest method per bandwidth."""

from qattn.kernels.gaussian.kernel import GaussianKernel

__all__ = ["GaussianKernel"]
