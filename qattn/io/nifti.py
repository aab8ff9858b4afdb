"""NIfTI files of both versions, compressed or not, by nibabel.

The size that a header declares is compared with the limit before anything is decompressed.
"""

import gzip
import math
from importlib import import_module
from io import BytesIO
from typing import BinaryIO

import numpy as np

from qattn.io.errors import check_size
from qattn.io.grid import Grid, grid_from_array

__all__ = ["read_nifti", "write_nifti", "write_nifti_gz"]

_HEADER_SIZES = 348, 540  # bytes, of versions 1 and 2


def read_nifti(data: bytes, limit: int) -> Grid:
    """Read an image with its header."""
    nibabel = import_module("nibabel")
    is_compressed = data[:2] == b"\x1f\x8b"
    with gzip.GzipFile(fileobj=BytesIO(data)) if is_compressed else BytesIO(data) as file:
        start = file.read(_HEADER_SIZES[1])
        is_second = b"\x00\x00\x02\x1c" in (start[:4], start[3::-1])  # 540 in either byte order
        image_class = nibabel.Nifti2Image if is_second else nibabel.Nifti1Image
        with nibabel.imageglobals.LoggingOutputSuppressor():  # its handler writes to stderr
            header = image_class.header_class(binaryblock=start[: _HEADER_SIZES[is_second]], check=False)
            num_voxels = math.prod(map(int, header.get_data_shape()))
            size = int(header.get_data_offset()) + num_voxels * header.get_data_dtype().itemsize
            is_scaled = header.get_slope_inter() not in ((None, None), (1.0, 0.0))
            check_size(max(size, num_voxels * 8 if is_scaled else 0), limit)  # scaled values are float64
            content = start + file.read(max(size - len(start), 0))
            file.read(1)  # at the end of the declared content, this verifies the checksum
            image = image_class.from_bytes(content)
    return grid_from_array(np.asanyarray(image.dataobj), image.header.get_zooms(), image.header)


def write_nifti(file: BinaryIO, grid: Grid) -> None:
    """Write an image, at its position in space if it was read from NIfTI."""
    nibabel = import_module("nibabel")
    values = grid.values.astype(np.uint8) if grid.values.dtype.kind == "b" else grid.values
    is_second = isinstance(grid.header, nibabel.Nifti2Header)
    image_class = nibabel.Nifti2Image if is_second else nibabel.Nifti1Image
    if isinstance(grid.header, nibabel.Nifti1Header):  # the base class of Nifti2Header
        image = image_class(values, grid.header.get_best_affine(), grid.header, dtype=values.dtype)
    else:
        sizes = [*grid.spacing, 1.0, 1.0][:3]
        image = image_class(values, np.diag([*sizes, 1.0]), dtype=values.dtype)
    file.write(image.to_bytes())


def write_nifti_gz(file: BinaryIO, grid: Grid) -> None:
    """Write a compressed image."""
    content = BytesIO()
    write_nifti(content, grid)
    file.write(gzip.compress(content.getvalue(), mtime=0))
