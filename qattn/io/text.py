"""XYZ, TXT and CSV files: one row per point.

Columns may be separated by commas, semicolons, bars, tabs or blanks. Numbers may be quoted, and may have decimal commas
where commas do not separate columns. The line above the first row may name the columns. Columns of words are left out
with a warning.
"""

import csv
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import PartlyReadWarning, RefusedError

__all__ = ["cloud_from_columns", "read_text"]

_SEPARATORS = (";", "|", "\t", ",", None)  # None stands for blanks; a comma may be decimal, so it comes late
_NUM_SAMPLES = 200  # lines from which separator and number of columns are found
_BLOCK_ROWS = 512  # rows whose cells are held at once; with more, the garbage collector takes most of the time
_MISSING = ("", "na", "n/a", "null", "none", "-")
_MAX_UNNAMED = 100  # columns without names: splats have 62, images more


def read_text(data: bytes, limit: int) -> Cloud:
    """Read XYZ, TXT and CSV files; the size of the file bounds the memory."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    lines = [line for line in data.decode(encoding, "replace").splitlines() if line.strip()]
    rows = [line for line in lines if not line.lstrip().startswith(("#", "//"))]
    separator, width = _layout(rows)
    first = next(line for line in rows if _is_row(_split(line, separator), width))
    index = lines.index(first)
    names = _names(lines[index - 1] if index else "", separator, width)
    columns, words = _columns(rows[rows.index(first) :], separator, width)
    skipped = ", ".join(f"{_column_name(names[n])} ({cell!r})" for n, cell in words.items())
    if len(columns) < 2:
        raise RefusedError(f"two or more of its columns should be numbers; these are not: {skipped}.")
    if words:
        warnings.warn(f"columns that are not numbers are left out: {skipped}.", PartlyReadWarning, stacklevel=2)
    return cloud_from_columns(list(columns.values()), [names[n] for n in columns])


def cloud_from_columns(columns: Sequence[np.ndarray], names: Sequence[str | int]) -> Cloud:
    """Make a cloud of columns of shape (N,).

    Coordinates are the columns x, y and z if at least two of them exist, else the first three. The other columns are
    attributes.

    Args:
        columns: Arrays of shape (N,).
        names: Name of each column, or its number, counted from 1, if it has none.
    """
    num_rows, num_columns = len(columns[0]), len(columns)
    if not any(isinstance(name, str) for name in names):
        _check_plausible(num_rows, num_columns)
    axes = [names.index(axis) for axis in "xyz" if axis in names]
    if len(axes) < 2:
        axes = list(range(min(3, num_columns)))
    attributes = {_column_name(name): columns[n] for n, name in enumerate(names) if n not in axes}
    return cloud_from_arrays(np.column_stack([columns[n] for n in axes]), None, attributes)


def _column_name(name: str | int) -> str:
    return name if isinstance(name, str) else f"column_{name}"


def _check_plausible(num_rows: int, num_columns: int) -> None:
    """Refuse tables without names that are probably transposed, or no points at all."""
    if num_rows in (2, 3) and num_columns > 3:
        raise RefusedError(
            f"it has {num_rows} rows and {num_columns} columns without names, which looks transposed: save one row per "
            f"point. If it holds {num_rows} points, name the columns in the first line of a text file, or save them as "
            "`points` in an NPZ file."
        )
    if num_columns > _MAX_UNNAMED:
        raise RefusedError(
            f"it has {num_columns} columns without names, too many for x, y, z and attributes. Save points in more "
            "dimensions as `points` in an NPZ file, and an image as `mask`."
        )


def _layout(rows: list[str]) -> tuple[str | None, int]:
    """Find the separator that gives the most numbers in a sample of rows, and the most common number of columns."""
    sample = rows[:: -(-len(rows) // _NUM_SAMPLES)] if rows else []
    most_numbers, layout = 0, None
    for separator in _SEPARATORS:
        split = [cells for cells in (_split(line, separator) for line in sample) if _is_row(cells, len(cells))]
        num_numbers = sum(_is_number(cell) for cells in split for cell in cells)
        if num_numbers > most_numbers:
            widths = Counter(map(len, split))
            most_numbers, layout = num_numbers, (separator, max(widths, key=lambda width: (widths[width], width)))
    if layout is None:
        raise RefusedError("none of its lines holds two numbers or more.")
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
    """Parse a number as spreadsheets write it: NaN for an empty cell, a comma as decimal point."""
    cell = cell.strip().strip('"').strip()
    return math.nan if cell.lower() in _MISSING else float(cell.replace(",", ".", 1))


def _cells(lines: Iterable[str], separator: str | None) -> Iterator[list[str]]:
    """Split lines into cells; quotes protect separators."""
    if separator is not None:
        return csv.reader(lines, delimiter=separator, skipinitialspace=True)
    return (re.split(r"\s(?:#|//)", line, maxsplit=1)[0].split() for line in lines)


def _split(line: str, separator: str | None) -> list[str]:
    return next(_cells([line], separator), [])


def _names(line: str, separator: str | None, width: int) -> list[str | int]:
    """Return the names of columns from the line above them, which may be a comment, or their numbers from 1.

    The names x, y and z become lower case.
    """
    words = [word.strip().strip('"').strip() for word in _split(line.strip().lstrip("#/").strip(), separator)]
    nonempty = [word for word in words if word]
    if len(words) != width or len(set(nonempty)) != len(nonempty):
        return list(range(1, width + 1))
    return [(word.lower() if word.lower() in {*"xyz"} else word) or n for n, word in enumerate(words, 1)]


def _columns(lines: list[str], separator: str | None, width: int) -> tuple[dict[int, np.ndarray], dict[int, str]]:
    """Parse columns by index: nonempty columns of numbers, and the first word of each other column."""
    blocks: dict[int, list[np.ndarray]] = {n: [] for n in range(width)}
    words: dict[int, str] = {}
    rows, num_rows = _cells(lines, separator), 0
    while block := list(islice(rows, _BLOCK_ROWS)):
        for number, row in enumerate(block, num_rows + 1):
            if len(row) != width:
                raise ValueError(f"row {number} has {len(row)} columns where others have {width}")
        num_rows += len(block)
        for n, cells in enumerate(zip(*block, strict=True)):
            if n not in words:
                try:
                    blocks[n].append(_numbers(cells))
                except ValueError:
                    words[n] = next(cell for cell in cells if _is_word(cell))
    columns = {n: np.concatenate(parts) for n, parts in blocks.items() if n not in words}
    return {n: column for n, column in columns.items() if not np.isnan(column).all()}, words


def _numbers(cells: Sequence[str]) -> np.ndarray:
    try:
        return np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:  # quotes, blanks, decimal commas or empty cells
        return np.fromiter(map(_number, cells), np.float64, len(cells))
