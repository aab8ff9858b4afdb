"""Arguments that several commands take: files to read and write, and bandwidths."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from qattn import io
from qattn.io import Cloud, Grid

__all__ = ["FILE_HELP", "SIGMA_HELP", "TOL", "File", "output", "parse_sigma", "read_cloud", "read_shape", "spacing"]

TOL = 1e-4  # of row sums; a result that is written may cost two more passes than the default takes

FILE_HELP = f"Input file: {', '.join(io.FORMATS)}."
SIGMA_HELP = "Bandwidth: a length (0.05), a multiple of the point spacing (3x), or a share of the box diagonal (2%)."

File = Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP, show_default=False)]


def output(formats: str) -> Any:
    """Return the option `--output` for files of the given formats."""
    return typer.Option("--output", "-o", metavar="OUT", help=f"Output file: {formats}.", show_default=False)


def read_shape(file: Path) -> Cloud | Grid:
    """Read a file, and show a status meanwhile."""
    with Console(stderr=True).status(f"reading {file}"):
        return io.read(file)


def read_cloud(file: Path) -> Cloud:
    """Read a file that holds points."""
    shape = read_shape(file)
    if isinstance(shape, Grid):
        raise ValueError(f"{file} holds a grid; this command takes clouds, meshes and splats.")
    return shape


def spacing(shape: Cloud | Grid) -> float:
    """Return the mean distance between nearest points, or the mean size of a voxel over the axes."""
    return shape.spacing if isinstance(shape, Cloud) else float(np.mean(shape.spacing))


def parse_sigma(text: str, shape: Cloud | Grid) -> float:
    """Convert a bandwidth to a length: "0.05" is a length, "3x" three spacings, "2%" a share of the extent."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*([x%]?)\s*", text, re.IGNORECASE)
    number = float(match[1] + (match[2] or "")) if match else 0.0
    if match is None or not 0 < number < math.inf:
        raise ValueError(
            "--sigma should be a positive length (0.05), a multiple of the spacing (3x) or a share of the extent (2%); "
            f"got {text!r}."
        )
    if not match[3]:
        return number
    length = number * (0.01 * shape.extent if match[3] == "%" else spacing(shape))
    if length == 0:
        raise ValueError("All points coincide, so --sigma should be a length.")
    return length
