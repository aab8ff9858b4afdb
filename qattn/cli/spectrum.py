"""The command `qattn spectrum`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from qattn import io
from qattn.cli.arguments import SIGMA_HELP, TOL, File, output, read_shape
from qattn.cli.command import counted
from qattn.io import Cloud, Grid
from qattn.io.lengths import parse_sigma
from qattn.io.writing import check_target
from qattn.operators.diffusion import diffusion
from qattn.pictures import draw_modes
from qattn.spectra import Spectrum, eigsh
from qattn.spectra.automatic import spectrum as spectrum_of_points

__all__ = ["spectrum"]

_SIGMA = "3x"  # of voxels and splats, if none is given


def spectrum(
    file: File,
    out: Annotated[Path, output(".npz")],
    k: Annotated[int, typer.Option("-k", metavar="K", help="Number of eigenpairs.")] = 64,
    sigma: Annotated[
        str | None, typer.Option(metavar="SIGMA", help=f"{SIGMA_HELP} By default it follows from the shape.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Also draw the first modes and the eigenvalues.")
    ] = None,
) -> None:
    """Compute the leading eigenpairs of the diffusion operator Q, which approximate those of the Laplacian.

    For points without a given bandwidth, the bandwidth, masses, normals and the scale of frequencies are chosen
    automatically. Writes `values` λ, `frequencies` −(2/σ²) log λ, `vectors`, `residuals`, `mass`, `sigma`, `points` and
    `faces`.
    """
    check_target(out, (".npz",))
    if plot is not None:
        check_target(plot, (".png",))
    shape = read_shape(file)
    modes = _modes(shape, k, sigma)
    arrays = {
        "values": modes.values,
        "frequencies": modes.frequencies,
        "vectors": modes.vectors,
        "residuals": modes.residuals,
        "mass": modes.mass,
        "sigma": np.array(modes.sigma),
        "points": shape.coordinates if isinstance(shape, Cloud) else shape.kernel(1.0).points.numpy(),
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
        f"{out}: {counted(k, 'eigenpair')} of {counted(len(arrays['points']), 'point')} with σ = {modes.sigma:.4g}, "
        f"λ from {first:.4g} to {last:.4g}, residuals up to {largest:.0e}"
    )
    for name, choice in modes.choices.items():
        typer.echo(f"  {name:11}  {choice}")


def _modes(shape: Cloud | Grid, k: int, sigma: str | None) -> Spectrum:
    """Compute the spectrum of a shape, as arrays."""
    if isinstance(shape, Cloud):
        if sigma is None and shape.splats is None:
            return spectrum_of_points(shape.points, k, mass="auto" if shape.mass is None else shape.mass)
        mass = shape.mass
    else:
        mass = None
    kernel = shape.kernel(parse_sigma(sigma or _SIGMA, shape))
    return eigsh(diffusion(kernel, mass=mass, tol=TOL), k=k).numpy()
