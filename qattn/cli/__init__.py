"""The `qattn` command."""

from typing import Annotated

import typer

import qattn
from qattn.cli import bench, demo, diffuse, doctor, info, mass, spectrum, view, warm
from qattn.cli.command import Command, Group

__all__ = ["app"]

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
_COMMANDS = (
    *(doctor.doctor, warm.warm, demo.demo, view.view, info.info),
    *(diffuse.diffuse, spectrum.spectrum, mass.mass, bench.bench),
)
for _command in _COMMANDS:
    app.command(cls=Command)(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(qattn.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Diffusion operators by attention, for clouds, meshes, splats and voxel grids in files."""
