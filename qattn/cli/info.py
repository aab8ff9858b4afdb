"""The command `qattn info`."""

import math

import numpy as np
import typer

from qattn.cli.arguments import File, read_shape
from qattn.io import Cloud, Grid
from qattn.io.lengths import spacing_of
from qattn.mass import vertex_areas

__all__ = ["info"]


def info(file: File) -> None:
    """Show the content of a file and the bandwidths that suit it.

    The spacing is the mean distance from a point to its nearest neighbor, the extent is the diagonal of the box.
    """
    shape = read_shape(file)
    facts = _grid_facts(shape) if isinstance(shape, Grid) else _cloud_facts(shape)
    for name, text in [*facts, ("suggested σ", _suggested_sigma(spacing_of(shape), shape.extent))]:
        typer.echo(f"{name:13}{text}")


def _suggested_sigma(spacing: float, extent: float) -> str:
    """Format a range of σ, from a few neighbors to a part of the shape."""
    low, high = 2 * spacing, 0.1 * extent
    if low == 0:
        return "none: all points coincide"
    return f"{low:.3g} (2x) to {high:.3g} (10%)" if high > low else f"{low:.3g} (2x) or more"


def _cloud_facts(cloud: Cloud) -> list[tuple[str, str]]:
    kind = "splats" if cloud.splats is not None else "cloud" if cloud.faces is None else "mesh"
    low, high = cloud.box
    facts = [("type", kind), ("points", f"{len(cloud):,}")]
    if cloud.faces is not None:
        area = vertex_areas(cloud.points, cloud.faces).sum(dtype=np.float64)
        facts += [("faces", f"{len(cloud.faces):,}"), ("area", f"{area:.4g}")]
    sizes = " × ".join(f"{size:.4g}" for size in high - low)
    facts.append(("box", f"{sizes}, from ({_format_position(low, cloud.extent)})"))
    if cloud.offset.any():
        position = _format_position(cloud.offset, cloud.extent)
        facts.append(("offset", f"({position}), subtracted for float32 and added again"))
    facts += [("extent", f"{cloud.extent:.4g}"), ("spacing", f"{cloud.spacing:.4g}")]
    by_type: dict[str, list[str]] = {}
    for name, values in cloud.attributes.items():
        by_type.setdefault(f"{values.dtype}{list(values.shape[1:]) or ''}", []).append(name)
    attributes = "; ".join(f"{_shortened(names)} ({dtype})" for dtype, names in by_type.items())
    return [*facts, ("attributes", attributes or "none")]


def _grid_facts(grid: Grid) -> list[tuple[str, str]]:
    values = grid.values[grid.occupied]
    low, high = values.min(), values.max()
    kind = "mask" if low == high else f"{values.dtype}, occupied voxels from {low:.4g} to {high:.4g}"
    return [
        ("type", f"grid, {kind}"),
        ("voxels", f"{len(values):,} of {' × '.join(map(str, grid.values.shape))}"),
        ("extent", f"{grid.extent:.4g}"),
        ("spacing", " × ".join(f"{size:.4g}" for size in grid.spacing)),
    ]


def _format_position(position: np.ndarray, extent: float) -> str:
    """Format coordinates to about a thousandth of the extent."""
    digits = max(0, 3 - math.floor(math.log10(extent or 1.0)))
    return ", ".join(f"{value:.{digits}f}" for value in position)


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])}, … {names[-1]}"
