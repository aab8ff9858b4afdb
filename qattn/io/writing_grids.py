"""Writes grids as NIfTI, NRRD, NPY or NPZ, with what the header of a file of the same format said."""

import gzip
from importlib import import_module
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qattn.io.cloud import Grid

__all__ = ["GRID_WRITERS"]

Array = NDArray[Any]

# What the writer of a NRRD file says by itself.
_LAYOUT = frozenset(
    ("type", "dimension", "sizes", "encoding", "endian", "line skip", "lineskip", "byte skip", "byteskip")
)


def _nifti(file: BinaryIO, grid: Grid) -> None:
    nibabel = import_module("nibabel")
    values = _without_booleans(grid.values)
    is_second = isinstance(grid.header, nibabel.Nifti2Header)
    image_class = nibabel.Nifti2Image if is_second else nibabel.Nifti1Image
    if isinstance(grid.header, nibabel.Nifti1Header):  # of which the second is a subclass
        image = image_class(values, grid.header.get_best_affine(), grid.header, dtype=values.dtype)
    else:
        sizes = [*grid.spacing, 1.0, 1.0][:3]
        image = image_class(values, np.diag([*sizes, 1.0]), dtype=values.dtype)
    file.write(image.to_bytes())


def _packed_nifti(file: BinaryIO, grid: Grid) -> None:
    content = BytesIO()
    _nifti(content, grid)
    file.write(gzip.compress(content.getvalue(), mtime=0))


def _nrrd(file: BinaryIO, grid: Grid) -> None:
    nrrd = import_module("nrrd")
    header = {"spacings": list(grid.spacing)}
    if isinstance(grid.header, dict) and grid.header["dimension"] == grid.values.ndim:
        header = {name: value for name, value in grid.header.items() if name not in _LAYOUT}
    content = BytesIO()
    nrrd.write(content, _without_booleans(grid.values), header)
    file.write(content.getvalue())


def _npy(file: BinaryIO, grid: Grid) -> None:
    np.save(file, grid.values)


def _npz(file: BinaryIO, grid: Grid) -> None:
    np.savez(file, mask=grid.values, spacing=np.array(grid.spacing))


def _without_booleans(values: Array) -> Array:
    return values.astype(np.uint8) if values.dtype.kind == "b" else values


GRID_WRITERS = {".nii": _nifti, ".nii.gz": _packed_nifti, ".nrrd": _nrrd, ".npy": _npy, ".npz": _npz}
