"""PLY files: text or binary, polygons of any size, triangle strips, all vertex properties.

Nothing is allocated before the file is known to hold it, regardless of the counts in its header. Files are written here
too, because trimesh rounds coordinates to float32, which loses small differences far from the origin.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import RefusedError
from qattn.io.polygons import fan_triangles, strip_triangles

__all__ = ["read_ply", "write_ply"]

_TYPE_NAMES = {
    "i1": "char",
    "u1": "uchar",
    "i2": "short",
    "u2": "ushort",
    "i4": "int",
    "u4": "uint",
    "f4": "float",
    "f8": "double",
}
# Some programs write NumPy's names (int8, float32) instead.
_DTYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}
_DTYPES |= {np.dtype(dtype).name: dtype for dtype in (*_TYPE_NAMES, "i8", "u8")}
_BYTE_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
_CORNER_NAMES = ("vertex_index", "vertex_indices")


@dataclass(frozen=True)
class _Property:
    name: str
    dtype: str
    count_dtype: str | None  # of the length of a list; None for a single number


@dataclass(frozen=True)
class _Element:
    name: str
    num_rows: int
    properties: list[_Property] = field(default_factory=list)


@dataclass(frozen=True)
class _Lists:
    """Lists of numbers of different lengths, one after the other."""

    flat: np.ndarray
    counts: np.ndarray


class _Content:
    """The numbers behind the header, read in sequence; those of a text are stored as float64."""

    def __init__(self, data: bytes, form: str) -> None:
        self._is_text, self._order = form == "ascii", _BYTE_ORDERS[form]
        self._data = np.array([float(word) for word in data.split()]).view(np.uint8) if self._is_text else data
        self.position = 0

    def take(self, dtype: str, count: int) -> np.ndarray:
        """Read the next numbers; ValueError if fewer are left."""
        stored = np.dtype(self._stored(dtype))
        end = self.position + count * stored.itemsize
        if end > len(self._data) or count < 0:
            raise ValueError
        values = np.frombuffer(self._data, stored, count, self.position)
        self.position = end
        return values.astype(dtype, copy=False)

    def columns(self, layout: list[tuple[str, int]], num_rows: int) -> list[np.ndarray] | None:
        """Read rows of one layout, a pair (dtype, count) per column, as (num_rows, count) each; None if too few."""
        row = np.dtype([(str(n), self._stored(dtype), (count,)) for n, (dtype, count) in enumerate(layout)])
        end = self.position + num_rows * row.itemsize
        if end > len(self._data):
            return None
        rows = np.frombuffer(self._data, row, num_rows, self.position)
        self.position = end
        return [rows[str(n)].astype(dtype, copy=False) for n, (dtype, _) in enumerate(layout)]

    def _stored(self, dtype: str) -> str:
        return "f8" if self._is_text else self._order + dtype


def read_ply(data: bytes, limit: int) -> Cloud:
    """Read a cloud, a mesh or splats; the size of the file bounds the memory."""
    form, elements, start = _header(data)
    content = _Content(data[start:], form)
    tables = {element.name: _table(content, element) for element in elements if element.num_rows}
    columns = {name: _attribute(name, values) for name, values in tables.get("vertex", {}).items()}
    if not columns:
        raise RefusedError("it holds no points.")
    if not {*"xyz"} <= columns.keys():
        raise RefusedError(f"its vertices should have x, y and z; they have {', '.join(columns)}.")
    x = np.column_stack([columns.pop(axis) for axis in "xyz"])
    faces = [_triangles(tables[name], name) for name in ("face", "tristrips") if name in tables]
    return cloud_from_arrays(x, np.concatenate(faces) if faces else None, columns)


def _header(data: bytes) -> tuple[str, list[_Element], int]:
    """Parse the header: format, elements, and the position of the content."""
    newline = next((mark for mark in (b"\r\n", b"\n", b"\r") if data.startswith(b"ply" + mark)), None)
    end = -1 if newline is None else data.find(b"end_header")
    if newline is None or end < 0:
        raise ValueError("a PLY file starts with the line `ply`, and its header ends with the line `end_header`")
    form, elements = "", []
    for line in data[:end].decode("utf-8", "replace").splitlines()[1:]:
        match line.split():
            case ["format", form, _]:
                pass
            case ["element", name, num_rows]:
                elements.append(_Element(name, int(num_rows)))
            case ["property", "list", count_type, type_name, name]:
                elements[-1].properties.append(_Property(name, _DTYPES[type_name], _DTYPES[count_type]))
            case ["property", type_name, name]:
                elements[-1].properties.append(_Property(name, _DTYPES[type_name], None))
            case [word, *_] if word not in ("comment", "obj_info"):
                raise ValueError(f"the header has a line `{line}`")
    if form not in _BYTE_ORDERS:
        raise ValueError(f"the format should be one of {', '.join(_BYTE_ORDERS)}; it is {form or 'missing'}")
    for element in elements:
        if element.num_rows < 0 or (element.num_rows and not element.properties):
            raise ValueError(f"the element `{element.name}` has {element.num_rows} rows without properties")
    return form, elements, end + len(b"end_header") + len(newline)


def _table(content: _Content, element: _Element) -> dict[str, np.ndarray | _Lists]:
    """Read the properties of an element by name: (N, 1) for numbers, (N, C) for lists of one length, or lists."""
    start = content.position
    try:
        sizes = [len(values) for values in _row(content, element)]
        content.position = start
        table = _even_table(content, element, sizes)
        if table is None:
            content.position = start
            table = _uneven_table(content, element)
    except ValueError:
        raise ValueError(f"fewer {element.name} rows than the header declares") from None
    return table


def _row(content: _Content, element: _Element) -> list[np.ndarray]:
    return [
        content.take(p.dtype, 1 if p.count_dtype is None else int(content.take(p.count_dtype, 1)[0]))
        for p in element.properties
    ]


def _even_table(content: _Content, element: _Element, sizes: list[int]) -> dict[str, np.ndarray | _Lists] | None:
    """Read all rows at once if they are as long as the first, else return None."""
    layout: list[tuple[str, int]] = []
    for p, size in zip(element.properties, sizes, strict=True):
        layout += [(p.dtype, size)] if p.count_dtype is None else [(p.count_dtype, 1), (p.dtype, size)]
    columns = content.columns(layout, element.num_rows)
    if columns is None:
        return None
    table: dict[str, np.ndarray | _Lists] = {}
    remaining = iter(columns)
    for p, size in zip(element.properties, sizes, strict=True):
        if p.count_dtype is not None and (next(remaining) != size).any():
            return None
        table[p.name] = next(remaining)
    return table


def _uneven_table(content: _Content, element: _Element) -> dict[str, np.ndarray | _Lists]:
    """Read row by row, as each row states its own length."""
    rows = [_row(content, element) for _ in range(element.num_rows)]
    table: dict[str, np.ndarray | _Lists] = {}
    for p, values in zip(element.properties, zip(*rows, strict=True), strict=True):
        counts = np.array([len(numbers) for numbers in values])
        flat = np.concatenate(values)
        table[p.name] = flat[:, None] if p.count_dtype is None else _Lists(flat, counts)
    return table


def _attribute(name: str, values: np.ndarray | _Lists) -> np.ndarray:
    """Return a vertex property as (N,) or (N, C)."""
    if isinstance(values, _Lists):
        raise RefusedError(f"the property `{name}` has lists of different lengths. Remove it from the vertices.")
    return values[:, 0] if values.shape[1] == 1 else values


def _triangles(table: Mapping[str, np.ndarray | _Lists], element: str) -> np.ndarray:
    """Return the triangles (F, 3) of polygons (`element` is "face") or of strips."""
    name = next((name for name in _CORNER_NAMES if name in table), None)
    if name is None:
        raise RefusedError(f"its {element} rows should have a list `vertex_indices`; they have {', '.join(table)}.")
    lists = table[name]
    if not isinstance(lists, _Lists):
        lists = _Lists(lists.reshape(-1), np.full(len(lists), lists.shape[1]))
    corners = lists.flat.astype(np.int64)
    if element == "face":
        return fan_triangles(corners, lists.counts)
    return strip_triangles(np.insert(corners, np.cumsum(lists.counts)[:-1], -1))


def write_ply(file: BinaryIO, cloud: Cloud) -> None:
    """Write a binary file, with attributes as vertex properties."""
    x = cloud.coordinates
    if x.shape[1] != 3:
        raise ValueError(
            f"A PLY file holds points with 3 coordinates; these have {x.shape[1]} coordinates. Write .npz."
        )
    columns = list(zip("xyz", x.T, strict=True))
    for name, values in cloud.attributes.items():
        name, values = "_".join(name.split()) or "unnamed", _in_ply_dtype(values)
        parts = [(f"{name}_{n}", column) for n, column in enumerate(values.T)] if values.ndim == 2 else []
        columns += parts or [(name, values)]
    names = [name for name, _ in columns]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"Two properties of the PLY file would be named `{repeated}`. Rename one, or write .npz.")
    rows = np.empty(len(x), [(name, column.dtype.newbyteorder("<")) for name, column in columns])
    for name, column in columns:
        rows[name] = column
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(x)}"]
    header += [f"property {_TYPE_NAMES[column.dtype.str[1:]]} {name}" for name, column in columns]
    if cloud.faces is not None:
        header += [f"element face {len(cloud.faces)}", "property list uchar int vertex_indices"]
    file.write("\n".join([*header, "end_header\n"]).encode())
    file.write(rows.tobytes())
    if cloud.faces is not None:
        triangles = np.empty(len(cloud.faces), [("count", "u1"), ("corners", "<i4", (3,))])
        triangles["count"], triangles["corners"] = 3, cloud.faces
        file.write(triangles.tobytes())


def _in_ply_dtype(values: np.ndarray) -> np.ndarray:
    """Convert booleans, float16 and 64-bit integers, which PLY lacks, to a type that holds them."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        return values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)
    if values.dtype.itemsize == 8:
        fits_int32 = values.size == 0 or (values.min() >= -(2**31) and values.max() < 2**31)
        return values.astype(np.int32 if fits_int32 else np.float64)
    return values
