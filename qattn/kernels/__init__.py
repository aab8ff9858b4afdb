"""Kernels: one file per kind of data, each of which implements `attend`."""

from qattn.kernels.base import Kernel, PointKernel
from qattn.kernels.gaussian import GaussianKernel
from qattn.kernels.graph import GraphKernel
from qattn.kernels.matrix import MatrixKernel
from qattn.kernels.mixture import MixtureKernel
from qattn.kernels.oriented import OrientedKernel
from qattn.kernels.radial import ExponentialKernel, MaternKernel, RationalQuadraticKernel
from qattn.kernels.voxels import VoxelKernel

__all__ = [
    "ExponentialKernel",
    "GaussianKernel",
    "GraphKernel",
    "Kernel",
    "MaternKernel",
    "MatrixKernel",
    "MixtureKernel",
    "OrientedKernel",
    "PointKernel",
    "RationalQuadraticKernel",
    "VoxelKernel",
]
