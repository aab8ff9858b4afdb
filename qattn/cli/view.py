"""The command `qattn view`."""

from pathlib import Path
from typing import Annotated

import typer

from qattn.cli.arguments import FILE_HELP, SIGMA_HELP, read_shape
from qattn.io import Cloud, Grid, atomic_write
from qattn.io.lengths import parse_sigma
from qattn.io.writing import check_target
from qattn.shapes import creature

__all__ = ["view"]

_NUM_POINTS = 20_000  # of the creature


def view(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=FILE_HELP, show_default=False)] = None,
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="A second shape, to match.")] = None,
    sigma: Annotated[
        str | None, typer.Option(metavar="SIGMA", help=f"{SIGMA_HELP} By default one that suits the shape.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to listen on, or a free one after it.")] = 8080,
    export: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Write a page that works by itself, and end.")
    ] = None,
) -> None:
    """Open a page in the browser to look at a shape, its diffusion, modes, signatures and distances.

    Without a file, a generated creature is shown. The page is served on this machine alone, unless `--host` says
    otherwise: anyone who can reach it can upload files and start computations.
    """
    if export is not None:
        check_target(export, (".html",))
    shape = Cloud(creature(_NUM_POINTS)[0].numpy()) if file is None else read_shape(file)
    second: Cloud | Grid | None = None if other is None else read_shape(other)
    length = None if sigma is None else parse_sigma(sigma, shape)
    try:
        from qattn import viewer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The viewer needs {error.name}. Install it with `pip install 'qattn-diffusion[view]'`."
        ) from None
    if export is not None:
        model = viewer.Model(shape, second)
        picture = model.picture(model.start(length))
        with atomic_write(export) as target:
            target.write(viewer.exported_page(model, picture).encode())
        typer.echo(f"{export}: {picture.caption}")
        return
    served = viewer.Viewer(shape, second, host=host, port=port, sigma=length)
    typer.echo(f"{served.address} (Ctrl-C ends it)")
    try:
        served.wait()
    except KeyboardInterrupt:
        served.stop()
