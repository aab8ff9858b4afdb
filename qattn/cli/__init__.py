"""The `qattn` command."""

from typing import Annotated

import typer

import qattn
from qattn.cli.bench import bench
from qattn.cli.demo import demo
from qattn.cli.files import diffuse, info, mass, spectrum
from qattn.cli.help import Command, Group
from qattn.cli.kernels import doctor

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
    help="Diffusion operators by attention.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
for _command in (doctor, demo, info, diffuse, spectrum, mass, bench):
    app.command(cls=Command)(_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(qattn.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Diffusion operators by attention, of files or to try the kernels of this machine."""
