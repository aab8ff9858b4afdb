"""Reads PLY files: text or binary, polygons of any size, strips of triangles, all properties of the vertices.

Nothing is allocated before the file is known to hold it, whatever numbers its header has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import cloud_of
from qattn.io.cloud import Cloud
from qattn.io.limits import RefusedError
from qattn.io.polygons import fan, strip

__all__ = ["read_ply"]

Array = NDArray[Any]

_KINDS = {
    "char": "i1",
    "int8": "i1",
    "uchar": "u1",
    "uint8": "u1",
    "short": "i2",
    "int16": "i2",
    "ushort": "u2",
    "uint16": "u2",
    "int": "i4",
    "int32": "i4",
    "uint": "u4",
    "uint32": "u4",
    "int64": "i8",
    "uint64": "u8",
    "float": "f4",
    "float32": "f4",
    "double": "f8",
    "float64": "f8",
}
_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
_CORNERS = ("vertex_index", "vertex_indices")


@dataclass(frozen=True)
class _Property:
    name: str
    kind: str  # of its numbers
    count_kind: str | None  # of the length of a list; None for a single number


@dataclass(frozen=True)
class _Element:
    name: str
    length: int
    properties: list[_Property] = field(default_factory=list)


@dataclass(frozen=True)
class _Lists:
    """Lists of numbers, one after the other."""

    flat: Array
    counts: Array


class _Source(Protocol):
    """The content behind the header, read from front to back."""

    position: int

    def take(self, kind: str, count: int) -> Array:
        """The next numbers; ValueError if there are fewer."""

    def columns(self, layout: list[tuple[str, int]], length: int) -> list[Array] | None:
        """The next `length` rows of the same layout, (kind, count) of each column; None if there are fewer."""


class _Text:
    def __init__(self, data: bytes) -> None:
        self._numbers = np.array([float(word) for word in data.split()])
        self.position = 0

    def take(self, kind: str, count: int) -> Array:
        end = self.position + count
        if end > len(self._numbers) or count < 0:
            raise ValueError
        values = self._numbers[self.position : end].astype(kind)
        self.position = end
        return values

    def columns(self, layout: list[tuple[str, int]], length: int) -> list[Array] | None:
        counts = [count for _, count in layout]
        end = self.position + length * sum(counts)
        if end > len(self._numbers):
            return None
        rows = self._numbers[self.position : end].reshape(length, -1)
        self.position = end
        columns = np.split(rows, np.cumsum(counts)[:-1], axis=1)
        return [column.astype(kind) for column, (kind, _) in zip(columns, layout, strict=True)]


class _Binary:
    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def take(self, kind: str, count: int) -> Array:
        end = self.position + count * np.dtype(kind).itemsize
        if end > len(self._data) or count < 0:
            raise ValueError
        values: Array = np.frombuffer(self._data, kind, count, self.position)
        self.position = end
        return values

    def columns(self, layout: list[tuple[str, int]], length: int) -> list[Array] | None:
        size = sum(np.dtype(kind).itemsize * count for kind, count in layout)
        end = self.position + length * size
        if end > len(self._data):
            return None
        row = np.dtype([(str(n), kind, (count,)) for n, (kind, count) in enumerate(layout)])
        rows = np.frombuffer(self._data, row, length, self.position)
        self.position = end
        return [rows[str(n)] for n in range(len(layout))]


def read_ply(data: bytes, limit: int) -> Cloud:
    """Reads a cloud, a mesh or splats; `limit` is met by what the file itself takes."""
    form, elements, start = _header(data)
    source: _Source = _Text(data[start:]) if form == "ascii" else _Binary(data[start:])
    tables = {element.name: _table(source, element) for element in elements if element.length}
    columns = {name: _attribute(name, values) for name, values in tables.get("vertex", {}).items()}
    if not columns:
        raise RefusedError("it holds no points.")
    if not {*"xyz"} <= columns.keys():
        raise RefusedError(f"its vertices should have x, y and z; they have {', '.join(columns)}.")
    x = np.column_stack([columns.pop(axis) for axis in "xyz"])
    faces = [_triangles(tables[name], name) for name in ("face", "tristrips") if name in tables]
    return cloud_of(x, np.concatenate(faces) if faces else None, columns)


def _header(data: bytes) -> tuple[str, list[_Element], int]:
    """Format, elements and where the content starts."""
    newline = next((mark for mark in (b"\r\n", b"\n", b"\r") if data.startswith(b"ply" + mark)), None)
    end = -1 if newline is None else data.find(b"end_header")
    if newline is None or end < 0:
        raise ValueError("a PLY file starts with the line `ply`, and its header ends with the line `end_header`")
    form, elements = "", []
    for line in data[:end].decode("utf-8", "replace").splitlines()[1:]:
        match line.split():
            case ["format", form, _]:
                pass
            case ["element", name, length]:
                elements.append(_Element(name, int(length)))
            case ["property", "list", count_kind, kind, name]:
                elements[-1].properties.append(_Property(name, _KINDS[kind], _KINDS[count_kind]))
            case ["property", kind, name]:
                elements[-1].properties.append(_Property(name, _KINDS[kind], None))
            case [word, *_] if word not in ("comment", "obj_info"):
                raise ValueError(f"the header has a line `{line}`")
    if form not in _ORDERS:
        raise ValueError(f"the format should be one of {', '.join(_ORDERS)}; it is {form or 'missing'}")
    for element in elements:
        if element.length < 0 or (element.length and not element.properties):
            raise ValueError(f"the element `{element.name}` has {element.length} rows without properties")
    order = _ORDERS[form]
    return form, [_ordered(element, order) for element in elements], end + len(b"end_header") + len(newline)


def _ordered(element: _Element, order: str) -> _Element:
    """The element with the byte order of the file in its kinds."""
    properties = [
        _Property(p.name, order + p.kind, None if p.count_kind is None else order + p.count_kind)
        for p in element.properties
    ]
    return _Element(element.name, element.length, properties)


def _table(source: _Source, element: _Element) -> dict[str, Array | _Lists]:
    """The properties of an element by name: (N, 1) for numbers, (N, C) for lists of one length, or lists."""
    start = source.position
    try:
        sizes = [len(values) for values in _row(source, element)]
        source.position = start
        table = _even(source, element, sizes)
        if table is None:
            source.position = start
            table = _uneven(source, element)
    except ValueError:
        raise ValueError(f"fewer {element.name} rows than its header says") from None
    return table


def _row(source: _Source, element: _Element) -> list[Array]:
    return [
        source.take(p.kind, 1 if p.count_kind is None else int(source.take(p.count_kind, 1)[0]))
        for p in element.properties
    ]


def _even(source: _Source, element: _Element, sizes: list[int]) -> dict[str, Array | _Lists] | None:
    """All rows at once if they are as long as the first; None if they are not."""
    layout: list[tuple[str, int]] = []
    for p, size in zip(element.properties, sizes, strict=True):
        layout += [(p.kind, size)] if p.count_kind is None else [(p.count_kind, 1), (p.kind, size)]
    columns = source.columns(layout, element.length)
    if columns is None:
        return None
    table: dict[str, Array | _Lists] = {}
    remaining = iter(columns)
    for p, size in zip(element.properties, sizes, strict=True):
        if p.count_kind is not None and (next(remaining) != size).any():
            return None
        table[p.name] = next(remaining)
    return table


def _uneven(source: _Source, element: _Element) -> dict[str, Array | _Lists]:
    """Row by row, because each tells its own length."""
    rows = [_row(source, element) for _ in range(element.length)]
    table: dict[str, Array | _Lists] = {}
    for p, values in zip(element.properties, zip(*rows, strict=True), strict=True):
        counts = np.array([len(some) for some in values])
        flat = np.concatenate(values)
        table[p.name] = flat[:, None] if p.count_kind is None else _Lists(flat, counts)
    return table


def _attribute(name: str, values: Array | _Lists) -> Array:
    """A property of the vertices, (N,) or (N, C)."""
    if isinstance(values, _Lists):
        raise RefusedError(f"the property `{name}` has a list of its own length at each vertex. Take it out.")
    return values[:, 0] if values.shape[1] == 1 else values


def _triangles(table: Mapping[str, Array | _Lists], element: str) -> Array:
    """The triangles of polygons or of strips."""
    name = next((name for name in _CORNERS if name in table), None)
    if name is None:
        raise RefusedError(f"its {element} rows should have a list `vertex_indices`; they have {', '.join(table)}.")
    lists = table[name]
    if not isinstance(lists, _Lists):
        lists = _Lists(lists.reshape(-1), np.full(len(lists), lists.shape[1]))
    corners = lists.flat.astype(np.int64)
    if element == "face":
        return fan(corners, lists.counts)
    return strip(np.insert(corners, np.cumsum(lists.counts)[:-1], -1))
