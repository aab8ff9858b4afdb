"""Diffusion operators by attention: kernels, Sinkhorn-normalised, on the attention kernels that exist."""

from importlib import import_module
from types import ModuleType

from qattn import distributed, flows, geodesics, io, maps, mass, ragged, sampling, shapes, signatures
from qattn.attended import Attended, merge
from qattn.attention import attend, gaussian
from qattn.axioms import AxiomReport, check_axioms
from qattn.doctor import BackendReport, backends
from qattn.kernels import (
    ExponentialKernel,
    GaussianKernel,
    GraphKernel,
    Kernel,
    MaternKernel,
    MatrixKernel,
    MixtureKernel,
    RationalQuadraticKernel,
    VoxelKernel,
)
from qattn.operators import Diffusion, diffusion
from qattn.solver import SinkhornResult, sinkhorn
from qattn.spectral import Spectrum, eigsh, laplacian_eigenvalues

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`qattn.nn` without an import of its own; not before it is asked for, because huggingface_hub takes a while."""
    if name == "nn":
        return import_module("qattn.nn")
    raise AttributeError(f"module 'qattn' has no attribute {name!r}")


__all__ = [
    "Attended",
    "AxiomReport",
    "BackendReport",
    "Diffusion",
    "ExponentialKernel",
    "GaussianKernel",
    "GraphKernel",
    "Kernel",
    "MaternKernel",
    "MatrixKernel",
    "MixtureKernel",
    "RationalQuadraticKernel",
    "SinkhornResult",
    "Spectrum",
    "VoxelKernel",
    "attend",
    "backends",
    "check_axioms",
    "diffusion",
    "distributed",
    "eigsh",
    "flows",
    "gaussian",
    "geodesics",
    "io",
    "laplacian_eigenvalues",
    "maps",
    "mass",
    "merge",
    "nn",
    "ragged",
    "sampling",
    "shapes",
    "signatures",
    "sinkhorn",
]
