"""NRRD files by pynrrd.

The size that a header declares is compared with the limit before anything is decompressed.
"""

import math
import zlib
from bz2 import BZ2Decompressor
from importlib import import_module
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np

from qattn.io.errors import RefusedError, check_size
from qattn.io.grid import Grid, grid_from_array

__all__ = ["read_nrrd", "write_nrrd"]

_MAX_VOXEL_BYTES = 8
_DECOMPRESSORS: dict[str, Any] = {
    "gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "bz2": BZ2Decompressor,
    "bzip2": BZ2Decompressor,
}
# Header fields that pynrrd writes by itself.
_LAYOUT = frozenset(
    ("type", "dimension", "sizes", "encoding", "endian", "line skip", "lineskip", "byte skip", "byteskip")
)


def read_nrrd(data: bytes, limit: int) -> Grid:
    """Read a grid whose voxels are in the same file."""
    nrrd = import_module("nrrd")
    file = BytesIO(data)
    header = nrrd.read_header(file)
    if "data file" in header or "datafile" in header:
        raise RefusedError("its voxels are in another file. Save header and voxels in one file.")
    if _line_skip(header) > len(data):  # pynrrd would skip lines one by one
        raise ValueError("fewer lines than the header declares")
    num_voxels = math.prod(map(int, header["sizes"]))
    check_size(num_voxels, limit)
    raw_header, content = _decompress(header, file, num_voxels, limit)
    values = nrrd.read_data(raw_header, content)
    if content is not file and content.read(1):
        raise ValueError("more voxels than the header declares")
    if "space directions" in header:
        spacing: Any = np.linalg.norm(np.asarray(header["space directions"], np.float64), axis=-1)
    else:
        spacing = header.get("spacings", 1.0)
    return grid_from_array(values, spacing, dict(header))


def write_nrrd(file: BinaryIO, grid: Grid) -> None:
    """Write a grid, at its position in space if it was read from NRRD."""
    nrrd = import_module("nrrd")
    header = {"spacings": list(grid.spacing)}
    if isinstance(grid.header, dict) and grid.header["dimension"] == grid.values.ndim:
        header = {name: value for name, value in grid.header.items() if name not in _LAYOUT}
    content = BytesIO()
    nrrd.write(content, grid.values.astype(np.uint8) if grid.values.dtype.kind == "b" else grid.values, header)
    file.write(content.getvalue())


def _line_skip(header: dict[str, Any]) -> int:
    return int(header.get("line skip", header.get("lineskip", 0)))


def _decompress(header: dict[str, Any], file: BytesIO, num_voxels: int, limit: int) -> tuple[dict[str, Any], BytesIO]:
    """Return header and content of the grid without compression; unpack no more than the declared voxels need."""
    if header["encoding"] not in _DECOMPRESSORS:
        return header, file
    for _ in range(_line_skip(header)):
        file.readline()
    byte_skip = header.get("byte skip", header.get("byteskip", 0))
    max_bytes = limit if byte_skip < 0 else num_voxels * _MAX_VOXEL_BYTES + byte_skip
    decompressor = _DECOMPRESSORS[header["encoding"]]()
    content = decompressor.decompress(file.read(), min(max_bytes, limit) + 1)
    check_size(len(content), limit)
    if not decompressor.eof:
        raise ValueError(f"{'more' if len(content) > max_bytes else 'fewer'} voxels than the header declares")
    return {**header, "encoding": "raw", "line skip": 0, "lineskip": 0}, BytesIO(content)
