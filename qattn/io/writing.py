"""Writes clouds as PLY or NPZ, and grids as what they were: all that was read, with what was added.

PLY is written here, because trimesh rounds coordinates to float32, which far from the origin loses what is small.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qattn.io.cloud import Cloud, Grid
from qattn.io.writing_grids import GRID_WRITERS

__all__ = ["CLOUD_ENDINGS", "GRID_ENDINGS", "can_write", "endings_of", "replacing", "write"]

Array = NDArray[Any]

# What PLY calls the types that all readers know.
_TYPES = {
    "i1": "char",
    "u1": "uchar",
    "i2": "short",
    "u2": "ushort",
    "i4": "int",
    "u4": "uint",
    "f4": "float",
    "f8": "double",
}


def write(path: str | os.PathLike[str], shape: Cloud | Grid) -> None:
    """Writes a cloud as .ply, attributes as properties of the vertices, or as .npz, attributes as arrays.

    An attribute (N, C) becomes the properties name_0 to name_{C−1} of a PLY file. A grid becomes .nii, .nii.gz, .nrrd,
    .npy or .npz, and lies where it was in the world if it was read from the same format.

    Raises:
        ValueError: The ending is another, or PLY cannot hold the cloud. What was at `path` is then untouched.
    """
    ending = can_write(path, endings_of(shape))
    with replacing(path) as file:
        if isinstance(shape, Grid):
            GRID_WRITERS[ending](file, shape)
        else:
            _WRITERS[ending](file, shape)


def endings_of(shape: Cloud | Grid) -> tuple[str, ...]:
    """What a cloud or a grid can be written as."""
    return GRID_ENDINGS if isinstance(shape, Grid) else CLOUD_ENDINGS


def can_write(path: str | os.PathLike[str], endings: Iterable[str]) -> str:
    """Checks where a result is to go, which is worth knowing before it is computed, and returns its ending."""
    path = Path(path)
    ending = next((ending for ending in endings if path.name.lower().endswith(ending)), None)
    if ending is None:
        raise ValueError(f"{path} should end in {' or '.join(endings)}, which is what is written.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}.")
    return ending


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is whole; after an error, nothing has changed."""
    target = Path(os.path.realpath(path))  # what a link points to, instead of the link
    beside = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(beside, "xb") as file:
            yield file
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # what was asked for
        raise


def _npz(file: BinaryIO, cloud: Cloud) -> None:
    reserved = {"points", "faces", "file", "allow_pickle"} & cloud.attributes.keys()
    if reserved:
        raise ValueError(f"The attribute `{min(reserved)}` has a name that NPZ files cannot have. Rename it.")
    faces = {} if cloud.faces is None else {"faces": cloud.faces}
    np.savez(file, **{"points": cloud.coordinates, **faces, **cloud.attributes})  # type: ignore[arg-type]


def _ply(file: BinaryIO, cloud: Cloud) -> None:
    x = cloud.coordinates
    if x.shape[1] != 3:
        raise ValueError(
            f"PLY files hold points in space, and these have {x.shape[1]} coordinates. Write .npz instead."
        )
    columns = list(zip("xyz", x.T, strict=True))
    for name, values in cloud.attributes.items():
        name, values = "_".join(name.split()) or "unnamed", _known(values)
        several = [(f"{name}_{n}", column) for n, column in enumerate(values.T)] if values.ndim == 2 else []
        columns += several or [(name, values)]
    names = [name for name, _ in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"Two columns of the PLY file would be named `{twice}`. Rename an attribute, or write .npz.")
    rows = np.empty(len(x), [(name, column.dtype.newbyteorder("<")) for name, column in columns])
    for name, column in columns:
        rows[name] = column
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(x)}"]
    header += [f"property {_TYPES[column.dtype.str[1:]]} {name}" for name, column in columns]
    if cloud.faces is not None:
        header += [f"element face {len(cloud.faces)}", "property list uchar int vertex_indices"]
    file.write("\n".join([*header, "end_header\n"]).encode())
    file.write(rows.tobytes())
    if cloud.faces is not None:
        triangles = np.empty(len(cloud.faces), [("count", "u1"), ("corners", "<i4", (3,))])
        triangles["count"], triangles["corners"] = 3, cloud.faces
        file.write(triangles.tobytes())


def _known(values: Array) -> Array:
    """Numbers in a type that PLY has: float16 and long integers have none."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        return values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)
    if values.dtype.itemsize == 8:
        is_short = values.size == 0 or (values.min() >= -(2**31) and values.max() < 2**31)
        return values.astype(np.int32 if is_short else np.float64)
    return values


_WRITERS = {".ply": _ply, ".npz": _npz}

CLOUD_ENDINGS, GRID_ENDINGS = tuple(_WRITERS), tuple(GRID_WRITERS)
