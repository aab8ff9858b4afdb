"""PCD files of the Point Cloud Library: text, binary, and binary compressed by LZF, with all fields.

Nothing is allocated before the file is known to hold it, regardless of the counts in its header.
"""

import math
import warnings

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import PartlyReadWarning, RefusedError, check_size

__all__ = ["read_pcd"]

_TYPES = {"I": "i", "U": "u", "F": "f"}
_MAX_HEADER = 2**16  # bytes


def read_pcd(data: bytes, limit: int) -> Cloud:
    """Read a cloud with its fields; points that a scanner has marked as absent, by NaN, are left out with a warning."""
    header, start = _header(data)
    fields, num_points = _fields(header), int(header["POINTS"][0])
    check_size(num_points * sum(dtype.itemsize for _, dtype in fields), limit)
    encoding = header["DATA"][0].lower()
    if encoding == "ascii":
        columns = _from_text(data[start:], fields, num_points)
    elif encoding == "binary":
        columns = _from_rows(data[start:], fields, num_points)
    elif encoding == "binary_compressed":
        columns = _from_compressed(data[start:], fields, num_points)
    else:
        raise ValueError(f"unknown encoding {encoding!r}")
    named = {name.lower(): column for (name, _), column in zip(fields, columns, strict=True) if name != "_"}
    if not {"x", "y", "z"} <= named.keys():
        raise RefusedError(f"its fields should contain x, y and z; they are {', '.join(named)}.")
    points = np.stack([named.pop(name) for name in "xyz"], axis=1)
    is_present = np.isfinite(points).all(axis=1)
    if not is_present.all():
        warnings.warn(f"{(~is_present).sum():,} points that are NaN are left out.", PartlyReadWarning, stacklevel=2)
    attributes = {name: column[is_present] for name, column in _with_colors(named).items()}
    return cloud_from_arrays(points[is_present], None, attributes)


def _header(data: bytes) -> tuple[dict[str, list[str]], int]:
    """Read the lines up to DATA, as words by keyword; return them, and where the points begin."""
    header: dict[str, list[str]] = {}
    start = 0
    while "DATA" not in header:
        end = data.find(b"\n", start, _MAX_HEADER)
        if end < 0:
            raise ValueError("its header does not end")
        keyword, *words = data[start:end].decode("ascii").partition("#")[0].split() or [""]
        header[keyword] = words
        start = end + 1
    return header, start


def _fields(header: dict[str, list[str]]) -> list[tuple[str, np.dtype]]:
    """Return the name and the type of each field, in the order of the file."""
    names = header["FIELDS"]
    counts = header.get("COUNT", ["1"] * len(names))
    fields = []
    for name, size, kind, count in zip(names, header["SIZE"], header["TYPE"], counts, strict=True):
        fields.append((name, np.dtype((f"<{_TYPES[kind]}{int(size)}", (int(count),)))))
    return fields


def _from_text(data: bytes, fields: list[tuple[str, np.dtype]], num_points: int) -> list[np.ndarray]:
    words = data.split()
    widths = [math.prod(dtype.shape) for _, dtype in fields]
    if len(words) != num_points * sum(widths):
        raise ValueError(f"{len(words)} numbers, where the header declares {num_points * sum(widths)}")
    if not data.endswith(b"\n"):
        raise RefusedError("its last number may be cut short, as no line break follows. If it is whole, add one.")
    table = np.array(words, dtype="S").reshape(num_points, -1).astype(np.float64)
    columns = np.split(table, np.cumsum(widths)[:-1], axis=1)
    return [_flat(column.astype(dtype.base)) for column, (_, dtype) in zip(columns, fields, strict=True)]


def _from_rows(data: bytes, fields: list[tuple[str, np.dtype]], num_points: int) -> list[np.ndarray]:
    rows = np.dtype([(str(number), dtype) for number, (_, dtype) in enumerate(fields)])  # names may occur twice
    table = np.frombuffer(data, rows, num_points)
    return [_flat(table[str(number)]) for number in range(len(fields))]


def _from_compressed(data: bytes, fields: list[tuple[str, np.dtype]], num_points: int) -> list[np.ndarray]:
    """Read fields one after the other, each for all points."""
    packed_size, size = np.frombuffer(data, "<u4", 2).tolist()
    if size != num_points * sum(dtype.itemsize for _, dtype in fields) or len(data) < 8 + packed_size:
        raise ValueError("it holds less than its header declares")
    content, start, columns = _decompressed(data[8 : 8 + packed_size], size), 0, []
    for _, dtype in fields:
        columns.append(_flat(np.frombuffer(content, dtype, num_points, start)))
        start += num_points * dtype.itemsize
    return columns


def _decompressed(data: bytes, size: int) -> bytes:
    """Undo LZF: runs of bytes, and copies of what came before."""
    result, i = bytearray(), 0
    while i < len(data) and len(result) <= size:
        control = data[i]
        i += 1
        if control < 32:
            result += data[i : i + control + 1]
            i += control + 1
            continue
        length = control >> 5
        if length == 7:
            length += data[i]
            i += 1
        back = ((control & 31) << 8) + data[i] + 1
        i += 1
        if back > len(result):
            raise ValueError("a copy begins before the first byte")
        repeated = result[len(result) - back :][: length + 2]
        result += (repeated * ((length + 1) // len(repeated) + 1))[: length + 2]
    if len(result) != size:
        raise ValueError(f"{len(result)} bytes, where {size} are declared")
    return bytes(result)


def _flat(column: np.ndarray) -> np.ndarray:
    """Return numbers (N, 1) as (N,)."""
    return column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column


def _with_colors(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the field `rgb`, whose four bytes are blue, green, red and opacity, by three."""
    for name in ("rgb", "rgba"):
        packed = named.get(name)
        if packed is not None and packed.dtype.itemsize == 4 and packed.ndim == 1:
            blue, green, red, _ = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, 4).T
            others = {other: column for other, column in named.items() if other != name}
            return others | {"red": red, "green": green, "blue": blue}
    return named
