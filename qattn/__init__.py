"""Diffusion operators by attention: kernels, Sinkhorn-normalised, on the attention kernels that exist."""

from qattn.attended import Attended, merge
from qattn.attention import attend, gaussian
from qattn.doctor import BackendReport, backends

__version__ = "0.1.0"

__all__ = ["Attended", "BackendReport", "attend", "backends", "gaussian", "merge"]
