"""The command `qattn spectrum`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from qattn import io
from qattn.cli.arguments import SIGMA_HELP, TOL, File, output, parse_sigma, read_shape
from qattn.cli.command import counted
from qattn.io import Cloud
from qattn.io.writing import check_target
from qattn.operators.diffusion import diffusion
from qattn.pictures import draw_modes
from qattn.spectra import eigsh

__all__ = ["spectrum"]


def spectrum(
    file: File,
    out: Annotated[Path, output(".npz")],
    k: Annotated[int, typer.Option("-k", metavar="K", help="Number of eigenpairs.")] = 64,
    sigma: Annotated[str, typer.Option(metavar="SIGMA", help=SIGMA_HELP)] = "3x",
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Also draw the first modes and the eigenvalues.")
    ] = None,
) -> None:
    """Compute the leading eigenpairs of the diffusion operator Q, which approximate those of the Laplacian.

    Writes `values` λ, `frequencies` −(2/σ²) log λ, `vectors`, `residuals`, `mass`, `sigma`, `points` and `faces`.
    """
    check_target(out, (".npz",))
    if plot is not None:
        check_target(plot, (".png",))
    shape = read_shape(file)
    length = parse_sigma(sigma, shape)
    kernel = shape.kernel(length)
    modes = eigsh(diffusion(kernel, mass=shape.mass if isinstance(shape, Cloud) else None, tol=TOL), k=k)
    arrays = {
        "values": modes.values.numpy(),
        "frequencies": modes.frequencies.numpy(),
        "vectors": modes.vectors.numpy(),
        "residuals": modes.residuals.numpy(),
        "mass": modes.mass.numpy(),
        "sigma": np.array(length),
        "points": shape.coordinates if isinstance(shape, Cloud) else shape.kernel(length).points.numpy(),
    }
    if isinstance(shape, Cloud) and shape.faces is not None:
        arrays["faces"] = shape.faces
    with io.atomic_write(out) as target:
        np.savez(target, **arrays)
    if plot is not None:
        with io.atomic_write(plot) as picture:
            draw_modes(picture, *(torch.from_numpy(arrays[n]) for n in ("points", "vectors", "frequencies")))
    first, last, largest = float(modes.values[0]), float(modes.values[-1]), float(modes.residuals.max())
    typer.echo(
        f"{out}: {counted(k, 'eigenpair')} of {counted(len(arrays['points']), 'point')} with σ = {length:.4g}, "
        f"λ from {first:.4g} to {last:.4g}, residuals up to {largest:.0e}"
    )
