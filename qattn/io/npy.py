"""NPY and NPZ files: headers are read first, then only the arrays that are used, if they fit the limit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import IO, Any, BinaryIO
from zipfile import ZipFile

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import RefusedError, check_size
from qattn.io.grid import Grid, grid_from_array
from qattn.io.text import cloud_from_columns

__all__ = ["read_npy", "read_npz", "write_npy", "write_npz"]

_MAX_HEADER = 2**16  # bytes; NumPy takes no longer header


@dataclass(frozen=True)
class _StoredArray:
    """An array in a file of which only the header was read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    open: Callable[[], IO[bytes]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_real(self) -> bool:
        return self.dtype.kind in "biuf"

    def load(self) -> np.ndarray:
        with self.open() as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def read_npy(data: bytes, limit: int) -> Cloud | Grid:
    """Read a table of points, or a grid if it is boolean or has three axes; the size of the file bounds the memory."""
    stored = _read_header(lambda: BytesIO(data))
    if not stored.is_real:
        raise RefusedError("it should hold an array of real numbers.")
    if stored.num_bytes > len(data):
        raise ValueError("fewer numbers than the header declares")
    array = stored.load()
    if stored.dtype.kind == "b" or array.ndim == 3:
        return grid_from_array(array, 1.0)
    if array.ndim != 2 or array.size == 0:
        raise RefusedError(f"points should have shape (N, d) with at least one point; got {array.shape}.")
    return cloud_from_columns(list(array.T), range(1, array.shape[1] + 1))


def read_npz(data: bytes, limit: int) -> Cloud | Grid:
    """Read `points`, `faces` and arrays with one row per point, or `mask` and `spacing`; skip all others."""
    with ZipFile(BytesIO(data)) as archive:
        stored = {
            info.filename.removesuffix(".npy"): _read_header(partial(archive.open, info))
            for info in archive.infolist()
            if info.filename.endswith(".npy")
        }
        names = _used_names(stored)
        check_size(sum(stored[name].num_bytes for name in names), limit)
        arrays = {name: stored[name].load() for name in names}
    if "mask" in arrays:
        return grid_from_array(arrays["mask"], arrays.get("spacing", 1.0))
    return cloud_from_arrays(arrays.pop("points"), arrays.pop("faces", None), arrays)


def write_npy(file: BinaryIO, grid: Grid) -> None:
    """Write the values of a grid."""
    np.save(file, grid.values)


def write_npz(file: BinaryIO, shape: Cloud | Grid) -> None:
    """Write `points`, `faces` and all attributes of a cloud, or `mask` and `spacing` of a grid."""
    if isinstance(shape, Grid):
        np.savez(file, mask=shape.values, spacing=np.array(shape.spacing))
        return
    reserved = {"points", "faces", "file", "allow_pickle"} & shape.attributes.keys()
    if reserved:
        raise ValueError(f"The attribute `{min(reserved)}` has a name that is reserved in NPZ files. Rename it.")
    faces = {} if shape.faces is None else {"faces": shape.faces}
    np.savez(file, **{"points": shape.coordinates, **faces, **shape.attributes})  # type: ignore[arg-type]


def _read_header(open_file: Callable[[], IO[bytes]]) -> _StoredArray:
    """Read shape and dtype of an array without its content."""
    with open_file() as file:
        start = BytesIO(file.read(_MAX_HEADER))
    version = np.lib.format.read_magic(start)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"NPY version {version} is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(start)
    return _StoredArray(shape, dtype, open_file)


def _used_names(stored: dict[str, _StoredArray]) -> list[str]:
    """Return the names of the arrays that describe a grid or points."""
    if "mask" in stored:
        return [name for name in ("mask", "spacing") if name in stored]
    if "points" not in stored:
        raise RefusedError(f"it should hold `points` or `mask`; it holds {', '.join(stored) or 'nothing'}.")
    num_points = stored["points"].shape[:1]
    attributes = [
        name
        for name, array in stored.items()
        if name not in ("points", "faces")
        and array.is_real
        and len(array.shape) in (1, 2)
        and array.shape[:1] == num_points
    ]
    return ["points", *(["faces"] if "faces" in stored else []), *attributes]
