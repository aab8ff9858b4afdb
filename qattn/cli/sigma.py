"""Bandwidths as people give them: a length, a number of spacings, or a part of the extent."""

import math
import re

import numpy as np

from qattn.io import Cloud, Grid

__all__ = ["ABOUT_SIGMA", "bandwidth", "spacing"]

ABOUT_SIGMA = "The bandwidth: a length (0.05), spacings (3x) or a part of the diagonal of the box (2%)."


def spacing(shape: Cloud | Grid) -> float:
    """The mean distance to the nearest neighbour, of voxels the mean over the axes of their size."""
    return shape.spacing if isinstance(shape, Cloud) else float(np.mean(shape.spacing))


def bandwidth(text: str, shape: Cloud | Grid) -> float:
    """σ as a length: "0.05" is one, "3x" are three spacings, "2%" is a part of the extent, the diagonal of the box."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*([x%]?)\s*", text, re.IGNORECASE)
    number = float(found[1] + (found[2] or "")) if found else 0.0
    if found is None or not 0 < number < math.inf:
        raise ValueError(
            f"--sigma should be a positive length as 0.05, a number of spacings as 3x, or a part of the extent as 2%; "
            f"got {text!r}."
        )
    if not found[3]:
        return number
    length = number * (0.01 * shape.extent if found[3] == "%" else spacing(shape))
    if length == 0:
        raise ValueError("All points are in one place, so that --sigma has to be a length.")
    return length
