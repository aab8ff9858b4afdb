"""Gaussian attention: one function, and one file per backend that computes it."""

from qattn.attention.api import attend
from qattn.attention.score import Score, gaussian

__all__ = ["Score", "attend", "gaussian"]
