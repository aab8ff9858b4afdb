"""Arguments that several commands take: files to read and write, and bandwidths."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qattn import io
from qattn.io import Cloud, Grid

__all__ = ["FILE_HELP", "SIGMA_HELP", "TOL", "File", "output", "read_cloud", "read_shape"]

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
