"""Clouds from tables: one row per point, the columns x, y and z or the first three, the others attributes.

NPY arrays and text follow the same rule. Text is read as people and spreadsheets write it: columns between commas,
semicolons, bars, tabs or blanks, numbers in quotes, decimal commas where commas do not part the columns, names in a
first line. Columns of words are left out with a warning.
"""

import csv
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qattn.io.building import PartlyReadWarning, cloud_of
from qattn.io.cloud import Cloud
from qattn.io.limits import RefusedError

__all__ = ["cloud_of_columns", "read_text"]

Array = NDArray[Any]

_SEPARATORS = (";", "|", "\t", ",", None)  # None are blanks; a comma may be a decimal one, and comes late
_SAMPLE = 200  # lines by which separator and number of columns are found
_BLOCK = 512  # rows whose cells are held at once; with more, the garbage collector takes most of the time
_MISSING = ("", "na", "n/a", "null", "none", "-")
_MOST = 100  # columns without names; splats have 62, and pictures more


def read_text(data: bytes, limit: int) -> Cloud:
    """Reads XYZ, TXT and CSV files; `limit` is met by what the file itself takes."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    lines = [line for line in data.decode(encoding, "replace").splitlines() if line.strip()]
    rows = [line for line in lines if not line.lstrip().startswith(("#", "//"))]
    separator, width = _layout(rows)
    first = next(line for line in rows if _is_row(_split(line, separator), width))
    place = lines.index(first)
    names = _names(lines[place - 1] if place else "", separator, width)
    columns, words = _columns(rows[rows.index(first) :], separator, width)
    shown = ", ".join(f"{_name(names[n])} ({cell!r})" for n, cell in words.items())
    if len(columns) < 2:
        raise RefusedError(f"two or more of its columns should be numbers; these are not: {shown}.")
    if words:
        warnings.warn(f"columns that are not numbers are left out: {shown}.", PartlyReadWarning, stacklevel=2)
    return cloud_of_columns(list(columns.values()), [names[n] for n in columns])


def cloud_of_columns(columns: Sequence[Array], names: Sequence[str | int]) -> Cloud:
    """A cloud of columns (N,), whose names are strings, or their numbers if they have none.

    The coordinates are the columns x, y and z, if at least two of them are there, or the first three.
    """
    rows, count = len(columns[0]), len(columns)
    if not any(isinstance(name, str) for name in names):
        _check_plausible(rows, count)
    axes = [names.index(axis) for axis in "xyz" if axis in names]
    if len(axes) < 2:
        axes = list(range(min(3, count)))
    others = {
        name if isinstance(name, str) else f"column_{name}": columns[n] for n, name in enumerate(names) if n not in axes
    }
    return cloud_of(np.column_stack([columns[n] for n in axes]), None, others)


def _name(name: str | int) -> str:
    return name if isinstance(name, str) else f"column_{name}"


def _check_plausible(rows: int, count: int) -> None:
    """Refuses tables that are transposed, or no points at all, which only names of columns could tell."""
    if rows in (2, 3) and count > 3:
        raise RefusedError(
            f"it has {rows} rows and {count} columns without names, which looks transposed: save one row per point. "
            f"If it does hold {rows} points, name the columns in a first line of text, or save them as `points` in NPZ."
        )
    if count > _MOST:
        raise RefusedError(
            f"it has {count} columns without names, too many for x, y, z and attributes. Save points in more "
            "dimensions as `points` in NPZ, and a picture as `mask`."
        )


def _layout(rows: list[str]) -> tuple[str | None, int]:
    """The separator by which a sample of rows holds most numbers, and how many columns most of those rows have."""
    sample = rows[:: -(-len(rows) // _SAMPLE)] if rows else []
    best, layout = 0, None
    for separator in _SEPARATORS:
        split = [cells for cells in (_split(line, separator) for line in sample) if _is_row(cells, len(cells))]
        numbers = sum(_is_number(cell) for cells in split for cell in cells)
        if numbers > best:
            widths = Counter(map(len, split))
            best, layout = numbers, (separator, max(widths, key=lambda width: (widths[width], width)))
    if layout is None:
        raise RefusedError("no line of it holds two numbers or more.")
    return layout


def _is_row(cells: list[str], width: int) -> bool:
    return len(cells) == width and sum(_is_number(cell) for cell in cells) >= 2


def _is_number(cell: str) -> bool:
    return not _is_word(cell) and not math.isnan(_number(cell))


def _is_word(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return True
    return False


def _number(cell: str) -> float:
    """A number as spreadsheets write it, NaN for an empty cell; commas in it are decimal."""
    cell = cell.strip().strip('"').strip()
    return math.nan if cell.lower() in _MISSING else float(cell.replace(",", ".", 1))


def _cells(lines: Iterable[str], separator: str | None) -> Iterator[list[str]]:
    """The cells of each line; quotes protect separators."""
    if separator is not None:
        return csv.reader(lines, delimiter=separator, skipinitialspace=True)
    return (re.split(r"\s(?:#|//)", line, maxsplit=1)[0].split() for line in lines)


def _split(line: str, separator: str | None) -> list[str]:
    return next(_cells([line], separator), [])


def _names(line: str, separator: str | None, width: int) -> list[str | int]:
    """Names of columns from the line above them, which may be a comment; numbers from 1 where there are none.

    The names x, y and z become lower case.
    """
    words = [word.strip().strip('"').strip() for word in _split(line.strip().lstrip("#/").strip(), separator)]
    given = [word for word in words if word]
    if len(words) != width or len(set(given)) != len(given):
        return list(range(1, width + 1))
    return [(word.lower() if word.lower() in {*"xyz"} else word) or n for n, word in enumerate(words, 1)]


def _columns(lines: list[str], separator: str | None, width: int) -> tuple[dict[int, Array], dict[int, str]]:
    """The columns that are numbers, without those that are empty, and of each of the others the first word."""
    blocks: dict[int, list[Array]] = {n: [] for n in range(width)}
    words: dict[int, str] = {}
    rows, count = _cells(lines, separator), 0
    while block := list(islice(rows, _BLOCK)):
        for number, row in enumerate(block, count + 1):
            if len(row) != width:
                raise ValueError(f"row {number} has {len(row)} columns where others have {width}")
        count += len(block)
        for n, cells in enumerate(zip(*block, strict=True)):
            if n not in words:
                try:
                    blocks[n].append(_numbers(cells))
                except ValueError:
                    words[n] = next(cell for cell in cells if _is_word(cell))
    columns = {n: np.concatenate(parts) for n, parts in blocks.items() if n not in words}
    return {n: column for n, column in columns.items() if not np.isnan(column).all()}, words


def _numbers(cells: Sequence[str]) -> Array:
    try:
        return np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:  # quotes, blanks, decimal commas or nothing
        return np.fromiter(map(_number, cells), np.float64, len(cells))
