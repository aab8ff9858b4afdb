"""Voxel grids as files hold them."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from qattn._types import ArrayLike
from qattn.io.errors import RefusedError
from qattn.kernels import VoxelKernel
from qattn.kernels.voxels import checked_spacing

__all__ = ["Grid", "grid_from_array"]


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers on voxels: a mask, weights, labels or an image.

    Attributes:
        values: Booleans, integers or floating point as in the file, with 1, 2 or 3 axes. Voxels above 0 are occupied;
            at least one is.
        spacing: Size of a voxel along each axis.
        header: Header of the file, such as the position in space, for writing the same format again.
    """

    values: np.ndarray
    spacing: tuple[float, ...]
    header: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.values.ndim not in (1, 2, 3) or self.values.dtype.kind not in "biuf":
            raise ValueError(
                "`values` should be a grid of real numbers with 1, 2 or 3 axes; "
                f"got {self.values.dtype} of shape {self.values.shape}."
            )
        if not self.occupied.any():
            raise ValueError(
                f"`values` should have at least one occupied voxel, above 0; got none in shape {self.values.shape}."
            )
        checked_spacing(self.spacing, self.values.ndim)

    @cached_property
    def occupied(self) -> np.ndarray:
        """Boolean grid, True where the value is above 0."""
        return self.values if self.values.dtype.kind == "b" else self.values > 0

    @property
    def weights(self) -> np.ndarray:
        """Input of `VoxelKernel`: floating-point values as weights, else the occupied voxels."""
        return self.values if self.values.dtype.kind == "f" else self.occupied

    @property
    def extent(self) -> float:
        """Length of the diagonal of the box around the centers of the occupied voxels."""
        axes = range(self.values.ndim)
        indices = [np.flatnonzero(self.occupied.any(tuple(a for a in axes if a != axis))) for axis in axes]
        return float(np.linalg.norm([h * (i[-1] - i[0]) for i, h in zip(indices, self.spacing, strict=True)]))

    def kernel(self, sigma: float) -> VoxelKernel:
        """Return the kernel of the occupied voxels."""
        return VoxelKernel(torch.from_numpy(self.weights), sigma, self.spacing)

    def with_values(self, values: np.ndarray) -> "Grid":
        """Return a copy with other values."""
        return replace(self, values=values)


def grid_from_array(values: np.ndarray, spacing: ArrayLike, header: Any = None) -> Grid:
    """Convert an array of a file to native byte order and make a grid; a wrong one refuses the file."""
    while values.ndim > 3 and values.shape[-1] == 1:  # a single time or channel
        values = values[..., 0]
    if values.dtype.kind == "f":
        values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
    try:
        sizes = np.broadcast_to(np.ravel(spacing)[: values.ndim], (values.ndim,))
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        return Grid(native, tuple(map(float, sizes)), header)
    except ValueError as error:
        raise RefusedError(str(error)) from None
