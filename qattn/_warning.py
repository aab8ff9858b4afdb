"""Warnings at the line of the caller, however many frames of ours lie between."""

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["warn_caller"]

# Layers are called by way of torch, whose line tells a user as little as ours.
_INSIDE = tuple(f"{Path(file).parent}/" for file in (__file__, str(torch.__file__)))


def warn_caller(message: str) -> None:
    """Warns at the innermost frame that is neither qattn's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
