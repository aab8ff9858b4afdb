"""Reads NIfTI and NRRD grids: what the header declares is compared with the limit before anything is decompressed."""

import gzip
import math
import zlib
from bz2 import BZ2Decompressor
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import grid_of
from qattn.io.cloud import Grid
from qattn.io.limits import RefusedError, within

__all__ = ["read_nifti", "read_nrrd"]

Array = NDArray[Any]

_DOUBLE = 8  # bytes of the largest number of a voxel
_DECOMPRESSORS: dict[str, Any] = {
    "gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "bz2": BZ2Decompressor,
    "bzip2": BZ2Decompressor,
}


def read_nifti(data: bytes, limit: int) -> Grid:
    """Reads a NIfTI image of either version, compressed or not."""
    nibabel = import_module("nibabel")
    is_packed = data[:2] == b"\x1f\x8b"
    with gzip.GzipFile(fileobj=BytesIO(data)) if is_packed else BytesIO(data) as file:
        start = file.read(540)
        is_second = b"\x00\x00\x02\x1c" in (start[:4], start[3::-1])  # the size of its header, 540
        image_class = nibabel.Nifti2Image if is_second else nibabel.Nifti1Image
        with nibabel.imageglobals.LoggingOutputSuppressor():  # its handler writes to stderr
            header = image_class.header_class(binaryblock=start[: 540 if is_second else 348], check=False)
            voxels = math.prod(map(int, header.get_data_shape()))
            size = int(header.get_data_offset()) + voxels * header.get_data_dtype().itemsize
            is_scaled = header.get_slope_inter() not in ((None, None), (1.0, 0.0))
            within(limit, max(size, voxels * _DOUBLE if is_scaled else 0))
            content = start + file.read(max(size - len(start), 0))
            file.read(1)  # where the content ends as declared, this compares the checksum
            image = image_class.from_bytes(content)
    return grid_of(np.asanyarray(image.dataobj), image.header.get_zooms(), image.header)


def read_nrrd(data: bytes, limit: int) -> Grid:
    """Reads a NRRD grid whose voxels are in the same file."""
    nrrd = import_module("nrrd")
    file = BytesIO(data)
    header = nrrd.read_header(file)
    if "data file" in header or "datafile" in header:
        raise RefusedError("its voxels are in another file, and should be saved inside.")
    if header.get("line skip", header.get("lineskip", 0)) > len(data):  # which would be skipped one by one
        raise ValueError("fewer lines than its header says")
    voxels = math.prod(map(int, header["sizes"]))
    within(limit, voxels)
    plain, content = _unpacked(header, file, voxels, limit)
    values = nrrd.read_data(plain, content)
    if content is not file and content.read(1):
        raise ValueError("more voxels than its header says")
    if "space directions" in header:
        spacing: Any = np.linalg.norm(np.asarray(header["space directions"], np.float64), axis=-1)
    else:
        spacing = header.get("spacings", 1.0)
    return grid_of(values, spacing, dict(header))


def _unpacked(header: dict[str, Any], file: BytesIO, voxels: int, limit: int) -> tuple[dict[str, Any], BytesIO]:
    """The header and content of the same grid without compression, of which no more is unpacked than voxels take."""
    if header["encoding"] not in _DECOMPRESSORS:
        return header, file
    for _ in range(header.get("line skip", header.get("lineskip", 0))):
        file.readline()
    skipped = header.get("byte skip", header.get("byteskip", 0))
    most = limit if skipped < 0 else voxels * _DOUBLE + skipped
    decompressor = _DECOMPRESSORS[header["encoding"]]()
    content = decompressor.decompress(file.read(), min(most, limit) + 1)
    within(limit, len(content))
    if not decompressor.eof:
        raise ValueError(f"{'more' if len(content) > most else 'fewer'} voxels than its header says")
    return {**header, "encoding": "raw", "line skip": 0, "lineskip": 0}, BytesIO(content)
