"""Warnings that point at the line of the user, at any depth of the call stack."""

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["warn_caller"]

# Layers are called through torch, whose frames are skipped too.
_SKIPPED = tuple(f"{Path(file).parent}/" for file in (__file__, str(torch.__file__)))


def warn_caller(message: str) -> None:
    """Warn at the innermost frame outside qattn and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
