"""Diffusion operators by attention: kernels, Sinkhorn-normalised, on the attention kernels that exist."""

from qattn import ragged
from qattn.attended import Attended, merge
from qattn.attention import attend, gaussian
from qattn.axioms import AxiomReport, check_axioms
from qattn.doctor import BackendReport, backends
from qattn.kernels import GaussianKernel, GraphKernel, Kernel, MatrixKernel, VoxelKernel
from qattn.operators import Diffusion, diffusion
from qattn.solver import SinkhornResult, sinkhorn

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "AxiomReport",
    "BackendReport",
    "Diffusion",
    "GaussianKernel",
    "GraphKernel",
    "Kernel",
    "MatrixKernel",
    "SinkhornResult",
    "VoxelKernel",
    "attend",
    "backends",
    "check_axioms",
    "diffusion",
    "gaussian",
    "merge",
    "ragged",
    "sinkhorn",
]
