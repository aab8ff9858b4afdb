"""Read files by their suffix: each format has a reader, and every failure becomes a one-line error.

A reader gets the bytes of a file and not its path, so that it cannot open other files, such as textures.
"""

import logging
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

from qattn.io.cloud import Cloud
from qattn.io.errors import PartlyReadWarning, RefusedError, check_size
from qattn.io.grid import Grid
from qattn.io.las import read_las
from qattn.io.nifti import read_nifti
from qattn.io.npy import read_npy, read_npz
from qattn.io.nrrd import read_nrrd
from qattn.io.obj import read_obj
from qattn.io.off_stl_glb import read_glb, read_off, read_stl
from qattn.io.pcd import read_pcd
from qattn.io.ply import read_ply
from qattn.io.text import read_text

__all__ = ["FORMATS", "read"]

_READERS: dict[str, Callable[[bytes, int], Cloud | Grid]] = {
    "ply": read_ply,
    "obj": read_obj,
    "off": read_off,
    "stl": read_stl,
    "glb": read_glb,
    "pcd": read_pcd,
    "las": read_las,
    "laz": read_las,
    "xyz": read_text,
    "txt": read_text,
    "csv": read_text,
    "npy": read_npy,
    "npz": read_npz,
    "nii": read_nifti,
    "nii.gz": read_nifti,
    "nrrd": read_nrrd,
}
FORMATS = tuple(_READERS)

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_LIBRARIES = ("trimesh", "laspy", "nibabel", "nrrd")
for _library in _LIBRARIES:  # without a handler, Python prints what they log: tracebacks, for a damaged file
    logging.getLogger(_library).addHandler(logging.NullHandler())


def read(path: str | os.PathLike[str], *, limit: int = 4 * 2**30) -> Cloud | Grid:
    r"""Read a point cloud, a mesh, splats or a voxel grid; the suffix selects the format.

    | suffix | result |
    |---|---|
    | ply | cloud, mesh or splats with all vertex properties; polygons and strips are triangulated |
    | obj | mesh or cloud with vertex colors; each vertex once, regardless of materials and objects |
    | off, stl, glb | mesh or cloud with vertex colors; all parts of a scene are joined |
    | pcd | cloud with all fields, in text, binary or compressed; NaN points are left out |
    | las, laz | cloud with all dimensions |
    | xyz, txt, csv | cloud: columns x, y and z, or the first three; the others are attributes |
    | npy | the same from an array (N, C) without names; a grid if it is boolean or has three axes |
    | npz | cloud of `points` (N, d), `faces` and arrays of N rows, or grid of `mask` and `spacing` |
    | nii, nii.gz, nrrd | grid |

    Text columns are separated by commas, semicolons, bars, tabs or blanks, and may be quoted; where commas do not
    separate columns, they are decimal. Empty cells are NaN. Columns of words are left out with a warning.

    Args:
        path: A regular file.
        limit: Largest size in bytes of the file and of its decompressed content.

    Returns:
        A `Cloud` or a `Grid`.

    Raises:
        ValueError: The file is empty, truncated, damaged, above the limit, not a regular file, of an unknown format, or
            holds points that are not finite.
        ModuleNotFoundError: The library for the format is not installed; the message tells how to install it.

    Warns:
        PartlyReadWarning: Part of the file was left out.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "two.csv").write_text("x,y,z,height\n0,0,0,7\n1,0,0,8\n")
        ...     cloud = read(Path(folder, "two.csv"))
        >>> cloud.points.shape, cloud.attributes["height"]
        ((2, 3), array([7., 8.]))
    """
    path = Path(path)
    suffix = next((suffix for suffix in FORMATS if path.name.lower().endswith(f".{suffix}")), None)
    if suffix is None:
        raise ValueError(f"{path} should have a suffix that names its format: one of {', '.join(FORMATS)}.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("error", message="string or file could not be read")  # NumPy, on truncated text
        shape = _read(path, suffix, limit)
    for warning in caught:
        if issubclass(warning.category, PartlyReadWarning):  # drop what libraries warn of
            warnings.warn(f"{path}: {warning.message}", PartlyReadWarning, stacklevel=2)
    return shape


def _read(path: Path, suffix: str, limit: int) -> Cloud | Grid:
    """Read a file; every failure is a one-line error that names the file."""
    try:
        data = _read_bytes(path, limit)
        if not data:
            raise RefusedError("it is empty.")
        return _READERS[suffix](data, limit)
    except RefusedError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    except MemoryError:
        raise ValueError(f"{path} cannot be used: its content does not fit into memory.") from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # without a name, it is from a decompressor
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in _LIBRARIES:
            raise ModuleNotFoundError(
                f"Reading .{suffix} needs {error.name}. Install it with `pip install 'qattn-diffusion[io]'`.",
                name=error.name,
            ) from None
        reason = " ".join(str(error).split()).rstrip("!.") or "no reason given"
        raise ValueError(
            f"{path} is damaged, truncated or not a {suffix.upper()} file ({type(error).__name__}: {reason[:200]})."
        ) from None


def _read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; refuse devices and pipes, which may have no end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise RefusedError(f"it is {kind}, and only regular files are read. Copy its content into a file first.")
    check_size(status.st_size, limit)
    with open(path, "rb") as file:
        return file.read(status.st_size)
