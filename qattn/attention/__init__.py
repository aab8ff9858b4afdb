"""Gaussian attention: one function, and one file a kernel that can compute it."""

from qattn.attention.attend import attend
from qattn.attention.score import Score, gaussian

__all__ = ["Score", "attend", "gaussian"]
