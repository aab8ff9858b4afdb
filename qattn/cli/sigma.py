"""Bandwidths as people give them: a length, a number of spacings, or a part of the extent."""

import re

import numpy as np

from qattn.io import Cloud, Grid

__all__ = ["bandwidth", "spacing"]


def spacing(shape: Cloud | Grid) -> float:
    """The mean distance to the nearest neighbour, of voxels the mean over the axes of their size."""
    return shape.spacing if isinstance(shape, Cloud) else float(np.mean(shape.spacing))


def bandwidth(text: str, shape: Cloud | Grid) -> float:
    """σ as a length: "0.05" is one, "3x" are three spacings, "2%" is a part of the extent, the diagonal of the box."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([x%]?)\s*", text)
    try:
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    except ValueError:  # 1.2.3
        number, unit = 0.0, ""
    if not 0 < number < np.inf:
        raise ValueError(
            f"--sigma should be a positive length as 0.05, a number of spacings as 3x, or a part of the extent as 2%; "
            f"got {text!r}."
        )
    length = number * {"": 1.0, "x": spacing(shape), "%": 0.01 * shape.extent}[unit] if unit else number
    if length == 0:
        raise ValueError("All points are in one place, so that --sigma has to be a length.")
    return length
