"""Clouds and grids of the arrays that a reader found: byte order, types, and errors in the words of the user."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.cloud import Cloud, Grid
from qattn.io.limits import RefusedError

__all__ = ["PartlyReadWarning", "cloud_of", "grid_of"]

Array = NDArray[Any]


class PartlyReadWarning(UserWarning):
    """Something in a file was left out."""


def cloud_of(coordinates: Array, faces: Array | None, attributes: Mapping[str, Array]) -> Cloud:
    """A cloud of arrays in the byte order of the machine."""
    if coordinates.dtype.kind not in "iuf" or (faces is not None and faces.dtype.kind not in "iu"):
        raise RefusedError("points should be real numbers, and faces whole ones.")
    is_single = coordinates.dtype.kind == "f" and coordinates.dtype.itemsize <= 4
    x = np.ascontiguousarray(coordinates, np.float32 if is_single else np.float64)
    if faces is not None:
        faces = np.ascontiguousarray(faces, np.int64) if len(faces) else None
    native = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("=")) for name, a in attributes.items()}
    try:
        return Cloud(x, faces, native)
    except ValueError as error:
        raise RefusedError(str(error)) from None


def grid_of(values: Array, spacing: Any, header: Any = None) -> Grid:
    """A grid of at most three axes, in the byte order of the machine."""
    while values.ndim > 3 and values.shape[-1] == 1:  # time or channels, of which there is one
        values = values[..., 0]
    if values.dtype.kind == "f":
        values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
    try:
        sizes = np.broadcast_to(np.ravel(spacing)[: values.ndim], (values.ndim,))
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        return Grid(native, tuple(map(float, sizes)), header)
    except ValueError as error:
        raise RefusedError(str(error)) from None
