"""Lengths of a shape in which bandwidths are measured, and bandwidths as text."""

import math
import re

import numpy as np

from qattn.io.cloud import Cloud
from qattn.io.grid import Grid

__all__ = ["parse_sigma", "spacing_of"]


def spacing_of(shape: Cloud | Grid) -> float:
    """Return the mean distance between nearest points, or the mean size of a voxel over the axes."""
    return shape.spacing if isinstance(shape, Cloud) else float(np.mean(shape.spacing))


def parse_sigma(text: str, shape: Cloud | Grid, name: str = "--sigma") -> float:
    """Convert a bandwidth to a length: "0.05" is a length, "3x" three spacings, "2%" a share of the extent.

    Args:
        text: The bandwidth.
        shape: Shape whose spacing and extent are meant.
        name: Name of the argument in error messages.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*([x%]?)\s*", text, re.IGNORECASE)
    number = float(match[1] + (match[2] or "")) if match else 0.0
    if match is None or not 0 < number < math.inf:
        raise ValueError(
            f"{name} should be a positive length (0.05), a multiple of the spacing (3x) or a share of the extent (2%); "
            f"got {text!r}."
        )
    if not match[3]:
        return number
    length = number * (0.01 * shape.extent if match[3] == "%" else spacing_of(shape))
    if length == 0:
        raise ValueError(f"All points coincide, so {name} should be a length.")
    return length
