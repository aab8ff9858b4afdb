"""The command `qattn mass`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from qattn import io
from qattn.cli.arguments import SIGMA_HELP, File, output, read_cloud
from qattn.io.lengths import parse_sigma
from qattn.io.writing import CLOUD_SUFFIXES, check_target
from qattn.mass import density, vertex_areas

__all__ = ["mass"]


def mass(
    file: File,
    out: Annotated[Path, output(", ".join(CLOUD_SUFFIXES))],
    sigma: Annotated[
        str | None, typer.Option(metavar="SIGMA", help=f"{SIGMA_HELP} Default: vertex areas for meshes, 3x for clouds.")
    ] = None,
) -> None:
    """Compute the mass of each point, its share of the shape, and write it as the attribute `mass`.

    For a mesh, masses are vertex areas, which sum to its area. For a cloud, or if a bandwidth is given, they are one
    over the density of the points, and sum to 1.
    """
    check_target(out, CLOUD_SUFFIXES)
    cloud = read_cloud(file)
    if cloud.faces is not None and sigma is None:
        masses, kind = vertex_areas(cloud.points, cloud.faces), "vertex areas"
    else:
        length = parse_sigma(sigma or "3x", cloud)
        masses, kind = density(cloud.points, length), f"1 / density with σ = {length:.4g}"
    io.write(out, cloud.with_attributes(mass=masses))
    low, median, high = np.quantile(masses, [0, 0.5, 1])
    total = masses.sum(dtype=np.float64)
    typer.echo(f"{out}: {kind}; sum {total:.4g}, minimum {low:.3g}, median {median:.3g}, maximum {high:.3g}")
