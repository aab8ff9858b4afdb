"""Diffusion operators by attention.

A symmetric kernel K with point masses m becomes the operator Q = ΛKMΛ, Λ = diag(e^f), M = diag(m), once the potential f
makes its rows sum to one. Q keeps constants and mass, is self-adjoint for the masses, and has its spectrum in [0, 1].

    q = qattn.diffusion(points, sigma=0.1)  # normalize: a few passes of attention
    smooth = q @ signal  # apply: one pass

| task | names |
|---|---|
| make and apply operators | `diffusion`, `diffuse`, `Diffusion`, `Solver`, `check_axioms` |
| kernels of points | `GaussianKernel`, `ExponentialKernel`, `MaternKernel`, `RationalQuadraticKernel` |
| kernels of points with normals | `OrientedKernel`, `normals` |
| kernels of other data | `MixtureKernel`, `VoxelKernel`, `GraphKernel`, `MatrixKernel` |
| eigenpairs, signatures, maps | `spectrum`, `eigsh`, `Spectrum`, `signatures`, `maps` |
| layers for networks | `nn` |
| distances along a cloud and between clouds, flows, geodesics | `distances`, `flows`, `geodesics` |
| bandwidths, masses, shapes, batches, files | `bandwidths`, `mass`, `shapes`, `sampling`, `ragged`, `io` |
| several processes | `distributed`, and `group=` of `GaussianKernel` |
| the primitive, and its backends | `attend`, `merge`, `Attended`, `backends` |
"""

from importlib import import_module
from types import ModuleType

from qattn import (
    bandwidths,
    distances,
    distributed,
    flows,
    geodesics,
    io,
    maps,
    mass,
    ragged,
    sampling,
    shapes,
    signatures,
)
from qattn._versions import __version__ as __version__
from qattn.attended import Attended, merge
from qattn.attention import attend
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
    OrientedKernel,
    RationalQuadraticKernel,
    VoxelKernel,
)
from qattn.operators.diffusion import Diffusion, diffuse, diffusion
from qattn.operators.sinkhorn import SinkhornResult, Solver, sinkhorn
from qattn.orientation import normals
from qattn.spectra import Spectrum, eigsh, laplacian_eigenvalues
from qattn.spectra.automatic import spectrum


def __getattr__(name: str) -> ModuleType:
    """Import `qattn.nn` at its first use, because huggingface_hub takes a while to import."""
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
    "OrientedKernel",
    "RationalQuadraticKernel",
    "SinkhornResult",
    "Solver",
    "Spectrum",
    "VoxelKernel",
    "attend",
    "backends",
    "bandwidths",
    "check_axioms",
    "diffuse",
    "diffusion",
    "distances",
    "distributed",
    "eigsh",
    "flows",
    "geodesics",
    "io",
    "laplacian_eigenvalues",
    "maps",
    "mass",
    "merge",
    "nn",
    "normals",
    "ragged",
    "sampling",
    "shapes",
    "signatures",
    "sinkhorn",
    "spectrum",
]
