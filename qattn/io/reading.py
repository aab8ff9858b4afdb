"""Reads files: the libraries parse them, and what they return is checked here.

A file is read into memory first and given to its library without its place, so that no reader follows it to others,
such as textures. Whatever a library raises at broken content becomes one sentence.
"""

import gzip
import logging
import os
import re
import struct
import warnings
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.cloud import Cloud, Grid

__all__ = ["FORMATS", "read"]

Array = NDArray[Any]

_LIBRARIES = ("trimesh", "laspy", "nibabel", "nrrd")
for _library in _LIBRARIES:  # or Python prints what they log, which for a damaged file are tracebacks
    logging.getLogger(_library).addHandler(logging.NullHandler())


class _RefusedError(ValueError):
    """A file that is whole but not what can be used; its message is for the user."""


def read(path: str | os.PathLike[str]) -> Cloud | Grid:
    r"""Reads a file by its ending.

    | ending | gives |
    |---|---|
    | ply | a cloud, a mesh or splats, with all properties of the vertices |
    | obj, off, stl, glb | a mesh or a cloud, with colours of vertices; all parts of a scene in one |
    | las, laz | a cloud, with all dimensions |
    | xyz, txt, csv | a cloud: columns x, y and z, or the first three; the others are attributes |
    | npy | a cloud (N, d), or a grid if it is boolean or has three axes |
    | npz | a cloud of `points`, `faces` and arrays of as many rows, or a grid of `mask` and `spacing` |
    | nii, nii.gz, nrrd | a grid |

    Grids of integers are occupied where they are positive; those of floating point are weights.

    Raises:
        ValueError: The file is empty, cut short, damaged, of no format above, or holds points that are not finite.
        ModuleNotFoundError: The library that reads it is not installed; the message tells how to.

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
    data = path.read_bytes()
    if not data:
        raise ValueError(f"{path} is empty.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries say about themselves
            warnings.filterwarnings("error", message="string or file could not be read")  # NumPy, of text that is cut
            return _READERS[ending](data)
    except _RefusedError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    except Exception as error:
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


def _cloud(coordinates: Array, faces: Array | None, attributes: dict[str, Array]) -> Cloud:
    """A cloud of arrays in the byte order of the machine."""
    if coordinates.dtype.kind not in "iuf" or (faces is not None and faces.dtype.kind not in "iu"):
        raise _RefusedError("points should be real numbers, and faces whole ones.")
    is_single = coordinates.dtype.kind == "f" and coordinates.dtype.itemsize <= 4
    x = np.ascontiguousarray(coordinates, np.float32 if is_single else np.float64)
    if faces is not None:
        faces = np.ascontiguousarray(faces, np.int64) if len(faces) else None
    native = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("=")) for name, a in attributes.items()}
    try:
        return Cloud(x, faces, native)
    except ValueError as error:
        raise _RefusedError(str(error)) from None


def _grid(values: Array, spacing: Any) -> Grid:
    while values.ndim > 3 and values.shape[-1] == 1:  # time or channels, of which there is one
        values = values[..., 0]
    values = values > 0 if values.dtype.kind in "iu" else values
    if values.dtype.kind == "f":
        values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
    try:
        sizes = np.broadcast_to(np.ravel(spacing)[: values.ndim], (values.ndim,))
        return Grid(np.ascontiguousarray(values), tuple(map(float, sizes)))
    except ValueError as error:
        raise _RefusedError(str(error)) from None


def _ply(data: bytes) -> Cloud:
    ply = import_module("trimesh.exchange.ply")
    try:
        loaded = ply.load_ply(BytesIO(data), fix_texture=False, skip_materials=True)
    except ValueError as error:
        if "unexpected length" not in str(error):
            raise
        raise _RefusedError(
            "it is not as long as its header says, so that it is cut short or, if its polygons differ in size, "
            "to be saved as text or with triangles only."
        ) from None
    elements = loaded["metadata"]["_ply_raw"]
    columns: dict[str, Array] = {}
    for kind in ("vertex", "face"):
        element = elements.get(kind, {"length": 0})
        if element["length"]:
            found = element["data"]
            names = found if isinstance(found, dict) else found.dtype.names
            short = {name for name in names if len(found[name]) != element["length"]}
            if short or set(names) != set(element["properties"]):
                raise ValueError(f"fewer {kind} rows than its header says")
            if kind == "vertex":
                columns = {name: _property(found[name]) for name in names}
    if not columns:
        raise _RefusedError("it holds no points.")
    x = np.column_stack([columns.pop(axis) for axis in "xyz"])
    return _cloud(x, loaded.get("faces"), columns)


def _property(values: Array) -> Array:
    """A property of vertices: a number each, or a list of equal lengths, (count, numbers) in binary files."""
    if values.dtype.names is not None:
        values = values[values.dtype.names[-1]]
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _scene(ending: str) -> Callable[[bytes], Cloud]:
    def reader(data: bytes) -> Cloud:
        trimesh = import_module("trimesh")
        scene = trimesh.load_scene(
            BytesIO(data), file_type=ending, process=False, maintain_order=True, skip_materials=True
        )
        parts = [part for part in scene.dump() if len(part.vertices)]  # each where the scene puts it
        if not parts:
            raise _RefusedError("it holds no points.")
        counts = np.cumsum([0, *(len(part.vertices) for part in parts)])
        corners = [
            np.asarray(part.faces).reshape(-1, 3) + first
            for part, first in zip(parts, counts, strict=False)
            if hasattr(part, "faces")
        ]
        x, faces = np.concatenate([part.vertices for part in parts]), np.concatenate(corners) if corners else None
        if ending == "stl" and faces is not None:  # triangles by themselves: corners in one place are one vertex
            x, place = np.unique(x, axis=0, return_inverse=True)
            return _cloud(x, place.reshape(-1)[faces], {})
        return _cloud(x, faces, _shared([_attributes(part) for part in parts]))

    return reader


def _attributes(part: Any) -> dict[str, Array]:
    """Colours and further attributes of the vertices of a mesh or a cloud of trimesh."""
    N, found = len(part.vertices), {}
    if hasattr(part, "faces"):
        colours = part.visual.vertex_colors if part.visual.kind == "vertex" else None
        found = {name: np.asarray(values) for name, values in part.vertex_attributes.items()}
    else:
        colours = part.colors
    if colours is not None and len(colours) == N:
        found.update(zip(("red", "green", "blue", "alpha"), np.asarray(colours).T, strict=False))
    return {name: a for name, a in found.items() if a.ndim in (1, 2) and len(a) == N and a.dtype.kind in "biuf"}


def _shared(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The attributes that all parts have, joined."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _las(data: bytes) -> Cloud:
    laspy = import_module("laspy")
    # laspy would look for as many records as the header says, be it billions; one takes 54 bytes.
    if len(data) >= 104 and 54 * struct.unpack_from("<I", data, 100)[0] > len(data):
        raise ValueError("fewer records than its header says")
    # One thread: several trust the sizes in the table of chunks, and lazrs ends the process if memory is short.
    with laspy.open(BytesIO(data), read_evlrs=False, laz_backend=laspy.LazBackend.Lazrs) as file:
        header = file.header
        if header.point_count > 1000 * len(data):  # equal points take a byte a hundred; memory is taken for all
            raise ValueError("fewer points than its header says")
        if header.are_points_compressed and _chunks(data, header.offset_to_point_data) > len(data):
            raise ValueError("fewer chunks than its table says")
        try:
            las = file.read_points(-1)  # the points alone: records behind them may be billions too
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
                raise
            raise ValueError(str(error)) from None
    if len(las) != header.point_count:
        raise ValueError("fewer points than its header says")
    if len(las) == 0:
        raise _RefusedError("it holds no points.")
    names = [name for name in las.point_format.dimension_names if name not in ("X", "Y", "Z")]
    x = np.column_stack([np.asarray(axis, np.float64) for axis in (las.x, las.y, las.z)])
    return _cloud(x, None, {name: np.asarray(las[name]) for name in names})


def _chunks(data: bytes, start: int) -> int:
    """How many chunks of points a LAZ file says it has, for which lazrs takes memory."""
    (table,) = struct.unpack_from("<q", data, start)  # where their table is
    if table == -1:  # written in one go, so that its place stands at the end
        (table,) = struct.unpack_from("<q", data, len(data) - 8)
    return int(struct.unpack_from("<I", data, table + 4)[0])


def _text(data: bytes) -> Cloud:
    lines = data.decode("utf-8-sig").splitlines()
    first = next((number for number, line in enumerate(lines) if _numbers(line)), None)
    if first is None:
        raise _RefusedError("no line of it starts with two numbers or more.")
    separator = next((mark for mark in ",;" if mark in lines[first]), None)
    table = np.loadtxt(lines[first:], delimiter=separator, comments=("#", "//"), ndmin=2)
    names = _names(lines[first - 1], separator) if first else []
    if len(set(names) - {""}) != table.shape[1]:
        names = [*"xyz", *(f"column_{n}" for n in range(4, table.shape[1] + 1))][: table.shape[1]]
    axes = [names.index(axis) for axis in "xyz" if axis in names]
    if len(axes) < 2:
        axes = list(range(min(3, table.shape[1])))
    others = {name: table[:, n] for n, name in enumerate(names) if n not in axes}
    return _cloud(table[:, axes], None, others)


def _numbers(line: str) -> bool:
    words = re.split(r"[\s,;]+", line.strip())
    try:
        return len([float(word) for word in words[:2]]) == 2
    except ValueError:
        return False


def _names(line: str, separator: str | None) -> list[str]:
    """Names of columns from the line above them, which may be a comment; x, y and z in lower case."""
    words = [word.strip().strip('"') for word in line.strip().lstrip("#/").strip().split(separator)]
    return [word.lower() if word.lower() in {*"xyz"} else word for word in words]


def _npy(data: bytes) -> Cloud | Grid:
    array = np.load(BytesIO(data), allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise _RefusedError("it should hold an array of real numbers.")
    if array.dtype.kind == "b" or array.ndim == 3:
        return _grid(array, 1.0)
    return _cloud(array, None, {})


def _npz(data: bytes) -> Cloud | Grid:
    with np.load(BytesIO(data), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if "mask" in arrays:
        return _grid(arrays["mask"], arrays.get("spacing", 1.0))
    if "points" not in arrays:
        raise _RefusedError(f"it should hold `points` or `mask`; it holds {', '.join(arrays) or 'nothing'}.")
    x, faces = arrays.pop("points"), arrays.pop("faces", None)
    # One number or matrix that is not about the points is left out.
    others = {name: a for name, a in arrays.items() if a.ndim in (1, 2) and len(a) == len(x) and a.dtype.kind in "biuf"}
    return _cloud(x, faces, others)


def _nifti(data: bytes) -> Grid:
    nibabel = import_module("nibabel")
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    is_second = b"\x00\x00\x02\x1c" in (data[:4], data[3::-1])  # the size of its header, 540
    with nibabel.imageglobals.LoggingOutputSuppressor():  # its handler writes to stderr
        image = (nibabel.Nifti2Image if is_second else nibabel.Nifti1Image).from_bytes(data)
    return _grid(np.asanyarray(image.dataobj), image.header.get_zooms())


def _nrrd(data: bytes) -> Grid:
    nrrd = import_module("nrrd")
    file = BytesIO(data)
    header = nrrd.read_header(file)
    if "data file" in header or "datafile" in header:
        raise _RefusedError("its voxels are in another file, and should be saved inside.")
    if header.get("line skip", 0) > len(data):  # which would be skipped one by one
        raise ValueError("fewer lines than its header says")
    values = nrrd.read_data(header, file)
    if "space directions" in header:
        return _grid(values, np.linalg.norm(np.asarray(header["space directions"], np.float64), axis=-1))
    return _grid(values, header.get("spacings", 1.0))


_READERS: dict[str, Callable[[bytes], Cloud | Grid]] = {
    "ply": _ply,
    **{ending: _scene(ending) for ending in ("obj", "off", "stl", "glb")},
    "las": _las,
    "laz": _las,
    "xyz": _text,
    "txt": _text,
    "csv": _text,
    "npy": _npy,
    "npz": _npz,
    "nii": _nifti,
    "nii.gz": _nifti,
    "nrrd": _nrrd,
}

FORMATS = tuple(_READERS)
