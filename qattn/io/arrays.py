"""Reads NPY and NPZ files: headers first, then only the arrays that are used, if they fit the limit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import cloud_of, grid_of
from qattn.io.cloud import Cloud, Grid
from qattn.io.limits import RefusedError, within
from qattn.io.tables import cloud_of_columns

__all__ = ["read_npy", "read_npz"]

Array = NDArray[Any]

_HEADER = 2**16  # bytes that hold any header that NumPy takes


@dataclass(frozen=True)
class _Stored:
    """An array in a file, of which so far the header has been read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    open: Callable[[], IO[bytes]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_real(self) -> bool:
        return self.dtype.kind in "biuf"

    def load(self) -> Array:
        with self.open() as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def read_npy(data: bytes, limit: int) -> Cloud | Grid:
    """Reads a table of points, or a grid if it is boolean or has three axes; `limit` is met by the file itself."""
    stored = _header(lambda: BytesIO(data))
    if not stored.is_real:
        raise RefusedError("it should hold an array of real numbers.")
    if stored.size > len(data):
        raise ValueError("fewer numbers than its header says")
    array = stored.load()
    if stored.dtype.kind == "b" or array.ndim == 3:
        return grid_of(array, 1.0)
    if array.ndim != 2 or array.size == 0:
        raise RefusedError(f"points should have shape (N, d) with at least one point; got {array.shape}.")
    return cloud_of_columns(list(array.T), range(1, array.shape[1] + 1))


def read_npz(data: bytes, limit: int) -> Cloud | Grid:
    """Reads `points`, `faces` and arrays of as many rows, or `mask` and `spacing`; others stay as they are."""
    with ZipFile(BytesIO(data)) as archive:
        stored = {
            info.filename.removesuffix(".npy"): _header(partial(archive.open, info))
            for info in archive.infolist()
            if info.filename.endswith(".npy")
        }
        used = _used(stored)
        within(limit, sum(stored[name].size for name in used))
        arrays = {name: stored[name].load() for name in used}
    if "mask" in arrays:
        return grid_of(arrays["mask"], arrays.get("spacing", 1.0))
    return cloud_of(arrays.pop("points"), arrays.pop("faces", None), arrays)


def _header(open_file: Callable[[], IO[bytes]]) -> _Stored:
    """Shape and type of an array, without its content."""
    with open_file() as file:
        start = BytesIO(file.read(_HEADER))
    version = np.lib.format.read_magic(start)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"NPY version {version} is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(start)
    return _Stored(shape, dtype, open_file)


def _used(stored: dict[str, _Stored]) -> list[str]:
    """The arrays to read; a number or a matrix that is not about the points is none of them."""
    if "mask" in stored:
        return [name for name in ("mask", "spacing") if name in stored]
    if "points" not in stored:
        raise RefusedError(f"it should hold `points` or `mask`; it holds {', '.join(stored) or 'nothing'}.")
    rows = stored["points"].shape[:1]
    about = [
        name
        for name, array in stored.items()
        if array.is_real and len(array.shape) in (1, 2) and array.shape[:1] == rows and name not in ("points", "faces")
    ]
    return ["points", *(["faces"] if "faces" in stored else []), *about]
