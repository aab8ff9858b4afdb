"""The file that a command is given."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qattn import io
from qattn.io import Cloud, Grid

__all__ = ["ABOUT_FILE", "File", "read_cloud", "read_shape"]

ABOUT_FILE = f"What to read: {', '.join(io.FORMATS)}."

File = Annotated[Path, typer.Argument(metavar="FILE", help=ABOUT_FILE, show_default=False)]


def read_shape(file: Path) -> Cloud | Grid:
    """What a file holds."""
    with Console(stderr=True).status(f"reading {file}"):
        return io.read(file)


def read_cloud(file: Path) -> Cloud:
    """The points of a file."""
    shape = read_shape(file)
    if isinstance(shape, Grid):
        raise ValueError(f"{file} holds a grid, and this takes clouds, meshes and splats.")
    return shape
