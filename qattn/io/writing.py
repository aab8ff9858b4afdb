"""Write clouds and grids by the suffix of the file, atomically."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from qattn.io.cloud import Cloud
from qattn.io.grid import Grid
from qattn.io.nifti import write_nifti, write_nifti_gz
from qattn.io.npy import write_npy, write_npz
from qattn.io.nrrd import write_nrrd
from qattn.io.ply import write_ply

__all__ = ["CLOUD_SUFFIXES", "GRID_SUFFIXES", "atomic_write", "check_target", "suffixes_of", "write"]

_CLOUD_WRITERS: dict[str, Callable[[BinaryIO, Cloud], None]] = {".ply": write_ply, ".npz": write_npz}
_GRID_WRITERS: dict[str, Callable[[BinaryIO, Grid], None]] = {
    ".nii": write_nifti,
    ".nii.gz": write_nifti_gz,
    ".nrrd": write_nrrd,
    ".npy": write_npy,
    ".npz": write_npz,
}
CLOUD_SUFFIXES, GRID_SUFFIXES = tuple(_CLOUD_WRITERS), tuple(_GRID_WRITERS)


def write(path: str | os.PathLike[str], shape: Cloud | Grid) -> None:
    """Write a cloud as .ply or .npz, or a grid as .nii, .nii.gz, .nrrd, .npy or .npz.

    Attributes become vertex properties of a PLY file or arrays of an NPZ file. In a PLY file, an attribute (N, C)
    becomes the properties name_0 to name_{C−1}. A grid that was read from NIfTI or NRRD keeps its position in space if
    it is written in the same format.

    Args:
        path: The file to write. On an error it stays unchanged.
        shape: A `Cloud` or a `Grid`.

    Raises:
        ValueError: The suffix is another one, or the format cannot hold the cloud.
    """
    suffix = check_target(path, suffixes_of(shape))
    with atomic_write(path) as file:
        if isinstance(shape, Grid):
            _GRID_WRITERS[suffix](file, shape)
        else:
            _CLOUD_WRITERS[suffix](file, shape)


def suffixes_of(shape: Cloud | Grid) -> tuple[str, ...]:
    """Return the suffixes that a cloud or a grid can be written as."""
    return GRID_SUFFIXES if isinstance(shape, Grid) else CLOUD_SUFFIXES


def check_target(path: str | os.PathLike[str], suffixes: Iterable[str]) -> str:
    """Check the path of a result before it is computed, and return its suffix."""
    path = Path(path)
    suffix = next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"{path} cannot be written: its name should end in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}.")
    return suffix


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once it is complete; after an error, `path` is unchanged."""
    target = Path(os.path.realpath(path))  # the target of a link, not the link
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # the path that the caller knows
        raise
