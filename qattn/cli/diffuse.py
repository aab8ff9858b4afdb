"""The command `qattn diffuse`: numbers are averaged, labels are put to a vote."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from qattn import _checks, io
from qattn.cli.arguments import SIGMA_HELP, TOL, File, output, read_shape
from qattn.io import Cloud, Grid
from qattn.io.lengths import parse_sigma
from qattn.io.writing import CLOUD_SUFFIXES, GRID_SUFFIXES, check_target, suffixes_of
from qattn.kernels import VoxelKernel
from qattn.operators.diffusion import Diffusion, diffusion

__all__ = ["diffuse"]

# Attributes with these names and integer values are codes, which have no average.
_LABEL_NAMES = frozenset(
    (
        *("category", "class", "classes", "classification", "label", "labels", "part", "segment", "segmentation"),
        *("semantic", "instance", "class_id", "instance_id", "label_id", "part_id", "segment_id"),
        *("number_of_returns", "point_source_id", "return_number", "scanner_channel", "user_data"),  # of LAS files
    )
)
_MAX_LABELS = 1000  # each is a channel
_CHANNELS_AT_ONCE = 32


def diffuse(
    file: File,
    out: Annotated[Path, output(f"{', '.join(CLOUD_SUFFIXES)}; for grids {', '.join(GRID_SUFFIXES)}")],
    sigma: Annotated[str, typer.Option(metavar="SIGMA", help=SIGMA_HELP, show_default=False)],
    signal: Annotated[
        list[str], typer.Option(metavar="NAME", help="Attribute to diffuse, or xyz for positions. Repeatable.")
    ] = ["xyz"],  # noqa: B006 (typer copies it)
    labels: Annotated[
        bool, typer.Option("--labels", help="Treat the signal as labels: each point takes the one of largest weight.")
    ] = False,
    box: Annotated[bool, typer.Option("--box", help="Diffuse a grid over all voxels, not only occupied ones.")] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of times to apply the operator.")] = 1,
) -> None:
    """Smooth the positions of points, their attributes, or the values of a grid.

    Smoothing positions removes noise. The result replaces what was diffused, everything else in the file is kept.

    Points are weighted by the attribute `mass` if there is one, vertices of a mesh by their areas, splats by their
    opacities. Integers are averaged and rounded. Integer codes, such as `classification` or `label`, are not averaged:
    each point takes the label of largest weight around it, as with `--labels`.

    The values of a grid are diffused between its occupied voxels, which are those above 0.
    """
    check_target(out, (*CLOUD_SUFFIXES, *GRID_SUFFIXES))
    _checks.integer("--steps", steps, 1)
    shape = read_shape(file)
    check_target(out, suffixes_of(shape))
    length = parse_sigma(sigma, shape)
    result: Cloud | Grid
    if isinstance(shape, Grid):
        if signal != ["xyz"]:
            raise ValueError(f"{file} holds a grid, whose values are diffused. Omit --signal.")
        result, remark = _diffuse_grid(shape, length, steps, labels, box)
    else:
        if box:
            raise ValueError(f"{file} holds points, and --box is for grids. Omit it.")
        result, remark = _diffuse_cloud(shape, length, steps, labels, list(dict.fromkeys(signal)))
    io.write(out, result)
    what = "values" if isinstance(shape, Grid) else ", ".join(signal)
    times = f", {steps} times" if steps > 1 else ""
    typer.echo(f"{out}: {what} diffused with σ = {length:.4g}{times}{remark}")


def _diffuse_cloud(cloud: Cloud, sigma: float, steps: int, labels: bool, names: list[str]) -> tuple[Cloud, str]:
    """Diffuse positions ("xyz") or attributes of a cloud; return the new cloud and a remark on the changes."""
    if labels and "xyz" in names:
        raise ValueError("--labels needs --signal with the name of an attribute, because positions are not labels.")
    signals = {name: _signal(cloud, name) for name in names}
    q = diffusion(cloud.kernel(sigma), mass=cloud.mass, tol=TOL)
    numbers = {name: values for name, values in signals.items() if not (labels or _is_label(name, values))}
    result, remarks = cloud, []
    for name, smooth in _averages(q, steps, numbers).items():
        if name == "xyz":
            result = result.with_points(smooth)
        else:
            result = result.with_attributes(**{name: _restored(smooth, cloud.attributes[name])})
    for name, values in signals.items():
        if name in numbers:
            continue
        winners = _vote(q, steps, values, name)
        remarks.append(f"; {(winners != cloud.attributes[name]).sum():,} of {len(cloud):,} points change their {name}")
        result = result.with_attributes(**{name: winners})
    distances = np.linalg.norm(result.coordinates - cloud.coordinates, axis=1)
    if distances.any():
        remarks.append(f"; points moved by {distances.mean():.3g} on average, {distances.max():.3g} at most")
    return result, "".join(remarks)


def _diffuse_grid(grid: Grid, sigma: float, steps: int, labels: bool, box: bool) -> tuple[Grid, str]:
    """Diffuse values between occupied voxels or over the whole box; return the new grid and a remark on the changes."""
    domain = np.ones_like(grid.occupied) if box else grid.occupied
    values = grid.values[domain]
    _check_values(grid, values, box)
    q = diffusion(VoxelKernel(domain, sigma, grid.spacing), tol=TOL)
    if labels:
        smooth = _vote(q, steps, values[:, None], "values")
    else:
        smooth = _restored(_averages(q, steps, {"values": values[:, None]})["values"], values)
    result = grid.values.copy()
    result[domain] = smooth
    return grid.with_values(result), f"; {(smooth != values).sum():,} of {len(values):,} voxels changed"


def _check_values(grid: Grid, values: np.ndarray, box: bool) -> None:
    if not box and (grid.values < 0).any():
        raise ValueError(
            "Some values of the grid are below 0, so that 0 does not mark the outside. Add --box to diffuse over the "
            "whole box, or set voxels outside to 0 and all others above 0."
        )
    num_bad = int((~np.isfinite(values)).sum())
    if num_bad:
        raise ValueError(f"{num_bad} of the {len(values)} voxels are NaN or infinite. Set them to 0, and omit --box.")
    if not box and values.min() == values.max():
        raise ValueError(
            "All occupied voxels have the same value, which diffusion between them keeps. Add --box to diffuse over "
            "the whole box."
        )


def _signal(cloud: Cloud, name: str) -> np.ndarray:
    """Return positions or an attribute as columns (N, C)."""
    if name != "xyz" and name not in cloud.attributes:
        raise ValueError(f"--signal should be one of {', '.join(['xyz', *cloud.attributes])}; got {name!r}.")
    values = cloud.points if name == "xyz" else cloud.attributes[name].reshape(len(cloud), -1)
    num_bad = int((~np.isfinite(values)).any(1).sum())
    if num_bad:
        raise ValueError(f"The attribute `{name}` is NaN or infinite at {num_bad} of the {len(cloud)} points.")
    return values


def _is_label(name: str, values: np.ndarray) -> bool:
    return name.lower() in _LABEL_NAMES and values.shape[1] == 1 and bool((values == np.rint(values)).all())


def _averages(q: Diffusion, steps: int, signals: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Diffuse columns (N, C) by name, all at once.

    Means are subtracted first, so that constants are kept whatever the error of the row sums.
    """
    if not signals:
        return {}
    means = [values.mean(0, dtype=np.float64) for values in signals.values()]
    columns = [(values - mean).astype(np.float32) for values, mean in zip(signals.values(), means, strict=True)]
    ends = np.cumsum([column.shape[1] for column in columns])[:-1]
    deviations = np.split(q.power(steps, np.column_stack(columns)), ends, axis=1)
    return {name: mean + deviation for name, mean, deviation in zip(signals, means, deviations, strict=True)}


def _vote(q: Diffusion, steps: int, values: np.ndarray, name: str) -> np.ndarray:
    """Return the label of largest weight at each point, by diffusing the indicators of labels (N, 1)."""
    labels, index = np.unique(values, return_inverse=True)
    if values.shape[1] != 1 or len(labels) > _MAX_LABELS or (labels != np.rint(labels)).any():
        raise ValueError(
            f"`{name}` should be labels: one integer per point, with at most {_MAX_LABELS} different values. "
            "Omit --labels to average it."
        )
    weight, winner = np.full(len(values), -np.inf), np.zeros(len(values), int)
    for start in range(0, len(labels), _CHANNELS_AT_ONCE):
        block = np.arange(start, min(start + _CHANNELS_AT_ONCE, len(labels)))
        weights = _averages(q, steps, {name: index.reshape(-1, 1) == block})[name]
        largest = weights.max(1)
        winner = np.where(largest > weight, start + weights.argmax(1), winner)
        weight = np.maximum(largest, weight)
    return labels[winner]


def _restored(smooth: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Convert to the shape and dtype of the values before; integers are rounded."""
    if values.dtype.kind != "f":
        smooth = np.clip(np.rint(smooth), values.min(), values.max())
    return smooth.reshape(values.shape).astype(values.dtype)
