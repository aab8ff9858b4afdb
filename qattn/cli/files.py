"""`qattn info`, `diffuse`, `spectrum` and `mass`: from file to file."""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from qattn import _checks, io
from qattn.cli.reading import File, read_cloud, read_shape
from qattn.cli.sigma import ABOUT_SIGMA, bandwidth, spacing
from qattn.cli.smoothing import How, smooth_cloud, smooth_grid
from qattn.cli.speaking import counted, one_sentence
from qattn.io import Cloud, Grid
from qattn.io.writing import CLOUD_ENDINGS, GRID_ENDINGS, can_write, endings_of
from qattn.kernels import MixtureKernel
from qattn.mass import density, vertex_areas
from qattn.operators import diffusion
from qattn.pictures import draw_modes
from qattn.spectral import eigsh, laplacian_eigenvalues

__all__ = ["diffuse", "info", "mass", "spectrum"]

Array = NDArray[Any]

_TOL = 1e-4  # of row sums: a result that is kept may cost two passes more than the default

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT", help="Where to write: .ply or .npz.", show_default=False)
]


def _listed(endings: tuple[str, ...]) -> str:
    return f"{', '.join(endings[:-1])} or {endings[-1]}"


def info(file: File) -> None:
    """Show what a file holds, and which bandwidths suit it.

    Spacing is the mean distance of a point to the nearest other one, extent the diagonal of the box.
    """
    with one_sentence():
        shape = read_shape(file)
        facts = _grid_facts(shape) if isinstance(shape, Grid) else _cloud_facts(shape)
        for name, text in [*facts, ("suggested σ", _suggestion(spacing(shape), shape.extent))]:
            typer.echo(f"{name:13}{text}")


def diffuse(
    file: File,
    out: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help=f"Where to write: {_listed(CLOUD_ENDINGS)}; a grid: {_listed(GRID_ENDINGS)}.",
            show_default=False,
        ),
    ],
    sigma: Annotated[str, typer.Option(metavar="SIGMA", help=ABOUT_SIGMA, show_default=False)],
    signal: Annotated[
        list[str], typer.Option(metavar="NAME", help="What to diffuse: an attribute, or xyz. May be given repeatedly.")
    ] = ["xyz"],  # noqa: B006 (typer copies it)
    labels: Annotated[
        bool, typer.Option("--labels", help="It is labels: each point takes the one that weighs most about it.")
    ] = False,
    box: Annotated[bool, typer.Option("--box", help="Diffuse a grid over its whole box, also where it is 0.")] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="How often the operator is applied.")] = 1,
) -> None:
    """Diffuse positions, which removes noise, or attributes, which smooths them, or the values of a grid.

    The result takes the place of what was diffused; all else is kept. Vertices of a mesh weigh their areas, points an
    attribute `mass` if there is one, and splats their opacities. Whole numbers are rounded, but those that are codes,
    such as `classification` or `label`, are put to the vote, as with `--labels`. The values of a grid are diffused
    between its occupied voxels, those above 0.
    """
    with one_sentence():
        can_write(out, (*CLOUD_ENDINGS, *GRID_ENDINGS))
        _checks.integer("--steps", steps, 1)
        shape = read_shape(file)
        can_write(out, endings_of(shape))
        how = How(bandwidth(sigma, shape), steps, labels, _TOL)
        result: Cloud | Grid
        if isinstance(shape, Grid):
            if signal != ["xyz"]:
                raise ValueError(f"{file} holds a grid, of which the values are diffused. Leave --signal out.")
            result, remark = smooth_grid(shape, box, how)
        else:
            if box:
                raise ValueError(f"{file} holds points, and --box is for grids. Leave it out.")
            result, remark = smooth_cloud(shape, list(dict.fromkeys(signal)), how)
        io.write(out, result)
        what = "values" if isinstance(shape, Grid) else ", ".join(signal)
        times = f", {steps} times" if steps > 1 else ""
        typer.echo(f"{out}: {what} diffused with σ = {how.sigma:.4g}{times}{remark}")


def spectrum(
    file: File,
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Where to write: .npz.", show_default=False)
    ],
    k: Annotated[int, typer.Option("-k", metavar="K", help="How many eigenpairs.")] = 64,
    sigma: Annotated[str, typer.Option(metavar="SIGMA", help=ABOUT_SIGMA)] = "3x",
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="A picture of the first modes and eigenvalues.")
    ] = None,
) -> None:
    """Compute the leading eigenpairs of the diffusion operator, which are those of the Laplacian.

    Writes `values` λ, `frequencies` −(2/σ²) log λ, `vectors`, `residuals`, `mass`, `sigma`, `points` and `faces`.
    """
    with one_sentence():
        can_write(out, (".npz",))
        if plot is not None:
            can_write(plot, (".png",))
        shape = read_shape(file)
        length = bandwidth(sigma, shape)
        kernel = shape.kernel(length)
        found = eigsh(diffusion(kernel, mass=shape.mass if isinstance(shape, Cloud) else None, tol=_TOL), k=k)
        width = kernel.effective_sigma(2) if isinstance(kernel, MixtureKernel) else length
        arrays = {
            "values": found.values.numpy(),
            "frequencies": laplacian_eigenvalues(found.values, width).numpy(),
            "vectors": found.vectors.numpy(),
            "residuals": found.residuals.numpy(),
            "mass": found.mass.numpy(),
            "sigma": np.array(length),
            "points": shape.coordinates if isinstance(shape, Cloud) else shape.kernel(length).points.numpy(),
        }
        if isinstance(shape, Cloud) and shape.faces is not None:
            arrays["faces"] = shape.faces
        with io.replacing(out) as target:
            np.savez(target, **arrays)
        if plot is not None:
            with io.replacing(plot) as picture:
                draw_modes(picture, *(torch.from_numpy(arrays[n]) for n in ("points", "vectors", "frequencies")))
        first, last, worst = float(found.values[0]), float(found.values[-1]), float(found.residuals.max())
        typer.echo(
            f"{out}: {counted(k, 'eigenpair')} of {counted(len(arrays['points']), 'point')} with σ = {length:.4g}, "
            f"λ from {first:.4g} to {last:.4g}, residuals up to {worst:.0e}"
        )


def mass(
    file: File,
    out: Output,
    sigma: Annotated[
        str | None, typer.Option(metavar="SIGMA", help=f"{ABOUT_SIGMA} By default areas for meshes and 3x for clouds.")
    ] = None,
) -> None:
    """Weigh points by how much of the shape each stands for, and write it as the attribute `mass`.

    These are the areas about the vertices of a mesh, which sum to its area; of a cloud, or with a bandwidth, one over
    the density of points there, which sums to 1.
    """
    with one_sentence():
        can_write(out, CLOUD_ENDINGS)
        cloud = read_cloud(file)
        if cloud.faces is not None and sigma is None:
            masses, what = vertex_areas(cloud.points, cloud.faces), "areas"
        else:
            length = bandwidth(sigma or "3x", cloud)
            masses, what = density(cloud.points, length), f"1 / density with σ = {length:.4g}"
        io.write(out, cloud.with_attributes(mass=masses))
        low, middle, high = np.quantile(masses, [0, 0.5, 1])
        total = masses.sum(dtype=np.float64)
        typer.echo(f"{out}: {what}; sum {total:.4g}, least {low:.3g}, median {middle:.3g}, most {high:.3g}")


def _suggestion(spacing: float, extent: float) -> str:
    """From where points see a few neighbours to where they see a part of the shape."""
    near, far = 2 * spacing, 0.1 * extent
    if near == 0:
        return "none: all points are in one place"
    return f"{near:.3g} (2x) to {far:.3g} (10%)" if far > near else f"{near:.3g} (2x) or more"


def _cloud_facts(cloud: Cloud) -> list[tuple[str, str]]:
    kind = "splats" if cloud.splats is not None else "a cloud" if cloud.faces is None else "a mesh"
    low, high = cloud.box
    facts = [("what", kind), ("points", f"{len(cloud):,}")]
    if cloud.faces is not None:
        area = vertex_areas(cloud.points, cloud.faces).sum(dtype=np.float64)
        facts += [("faces", f"{len(cloud.faces):,}"), ("area", f"{area:.4g}")]
    facts.append(("box", f"{' × '.join(f'{size:.4g}' for size in high - low)}, from ({_numbers(low, cloud.extent)})"))
    if cloud.offset.any():
        facts.append(("offset", f"({_numbers(cloud.offset, cloud.extent)}), taken off before float32, and added again"))
    facts += [("extent", f"{cloud.extent:.4g}"), ("spacing", f"{cloud.spacing:.4g}")]
    by_type: dict[str, list[str]] = {}
    for name, values in cloud.attributes.items():
        by_type.setdefault(f"{values.dtype}{list(values.shape[1:]) or ''}", []).append(name)
    named = "; ".join(f"{_some(names)} ({kind})" for kind, names in by_type.items())
    return [*facts, ("attributes", named or "none")]


def _grid_facts(grid: Grid) -> list[tuple[str, str]]:
    values = grid.values[grid.occupied]
    low, high = values.min(), values.max()
    kind = "a mask" if low == high else f"{values.dtype}, occupied by values from {low:.4g} to {high:.4g}"
    return [
        ("what", f"a grid, {kind}"),
        ("voxels", f"{len(values):,} of {' × '.join(map(str, grid.values.shape))}"),
        ("extent", f"{grid.extent:.4g}"),
        ("spacing", " × ".join(f"{size:.4g}" for size in grid.spacing)),
    ]


def _numbers(values: Array, extent: float) -> str:
    """Coordinates with as many digits as tell places of the shape apart."""
    digits = max(0, 3 - math.floor(math.log10(extent or 1.0)))
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])}, … {names[-1]}"
