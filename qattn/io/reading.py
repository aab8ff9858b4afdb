"""Reads files by their ending: one reader for each format, whose errors become one sentence.

A file is read into memory first and given to its reader without its place, so that no reader follows it to others, such
as textures.
"""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from qattn.io.arrays import read_npy, read_npz
from qattn.io.building import PartlyReadWarning
from qattn.io.cloud import Cloud, Grid
from qattn.io.las import read_las
from qattn.io.limits import LIMIT, RefusedError, regular_bytes
from qattn.io.obj import read_obj
from qattn.io.ply import read_ply
from qattn.io.scenes import scene_reader
from qattn.io.tables import read_text
from qattn.io.volumes import read_nifti, read_nrrd

__all__ = ["FORMATS", "read"]

_LIBRARIES = ("trimesh", "laspy", "nibabel", "nrrd")
for _library in _LIBRARIES:  # or Python prints what they log, which for a damaged file are tracebacks
    logging.getLogger(_library).addHandler(logging.NullHandler())


def read(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Cloud | Grid:
    r"""Reads a file by its ending.

    | ending | gives |
    |---|---|
    | ply | a cloud, a mesh or splats, with all properties of the vertices; polygons and strips become triangles |
    | obj | a mesh or a cloud: all vertices once, with their colors, whatever materials and objects there are |
    | off, stl, glb | a mesh or a cloud, with colors of vertices; all parts of a scene in one |
    | las, laz | a cloud, with all dimensions |
    | xyz, txt, csv | a cloud: columns x, y and z, or the first three; the others are attributes |
    | npy | the same of an array (N, C), without names; a grid if it is boolean or has three axes |
    | npz | a cloud of `points`, in any dimension, `faces` and arrays of as many rows, or a grid of `mask`, `spacing` |
    | nii, nii.gz, nrrd | a grid |

    Columns of text are parted by commas, semicolons, bars, tabs or blanks, and may be in quotes; where commas do not
    part them, commas are decimal. Empty cells are NaN, and columns of words are left out with a warning.

    Args:
        path: The file, which should be a regular one.
        limit: The most bytes that the file, or its content once decompressed, may have.

    Raises:
        ValueError: The file is empty, cut short, damaged, above the limit, no regular file, of no format above, or
            holds points that are not finite.
        ModuleNotFoundError: The library that reads it is not installed; the message tells how to.

    Warns:
        PartlyReadWarning: Something in the file was left out.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "two.csv").write_text("x,y,z,height\n0,0,0,7\n1,0,0,8\n")
        ...     cloud = read(Path(folder, "two.csv"))
        >>> cloud.points.shape, cloud.attributes["height"]
        ((2, 3), array([7., 8.]))
    """
    path = Path(path)
    ending = _ending(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("error", message="string or file could not be read")  # NumPy, of text that is cut
        shape = _read(path, ending, limit)
    for warning in caught:
        if issubclass(warning.category, PartlyReadWarning):  # others are what libraries say about themselves
            warnings.warn(f"{path}: {warning.message}", PartlyReadWarning, stacklevel=2)
    return shape


def _read(path: Path, ending: str, limit: int) -> Cloud | Grid:
    """Reads a file, with every failure as one sentence that names it."""
    try:
        data = regular_bytes(path, limit)
        if not data:
            raise RefusedError("it is empty.")
        return _READERS[ending](data, limit)
    except RefusedError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    except MemoryError:
        raise ValueError(f"{path} cannot be used: its content does not fit the memory.") from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # without a name, a decompressor complains
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in _LIBRARIES:
            raise ModuleNotFoundError(
                f"Reading .{ending} needs {error.name}. Install it with `pip install 'qattn-diffusion[io]'`.",
                name=error.name,
            ) from None
        why = " ".join(str(error).split()).rstrip("!.") or "no reason given"
        raise ValueError(
            f"{path} is damaged, cut short or no {ending.upper()} file ({type(error).__name__}: {why[:200]})."
        ) from None


def _ending(path: Path) -> str:
    name = path.name.lower()
    ending = next((ending for ending in _READERS if name.endswith(f".{ending}")), None)
    if ending is None:
        raise ValueError(f"{path} should have an ending that tells its format: one of {', '.join(FORMATS)}.")
    return ending


_READERS: dict[str, Callable[[bytes, int], Cloud | Grid]] = {
    "ply": read_ply,
    "obj": read_obj,
    **{ending: scene_reader(ending) for ending in ("off", "stl", "glb")},
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
