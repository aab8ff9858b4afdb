"""What `qattn diffuse` does to a cloud or a grid: numbers are averaged, and labels are put to the vote."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qattn.io import Cloud, Grid
from qattn.kernels import VoxelKernel
from qattn.operators import Diffusion, diffusion

__all__ = ["How", "smooth_cloud", "smooth_grid"]

Array = NDArray[Any]

# Integers under these names are codes, of which averages mean nothing.
_LABELS = frozenset(
    (
        *("category", "class", "classes", "classification", "label", "labels", "part", "segment", "segmentation"),
        *("semantic", "instance", "class_id", "instance_id", "label_id", "part_id", "segment_id"),
        *("number_of_returns", "point_source_id", "return_number", "scanner_channel", "user_data"),  # of LAS files
    )
)
_MOST_LABELS = 1000  # each is a channel
_AT_ONCE = 32  # channels of labels


class How(NamedTuple):
    """The options of `qattn diffuse` that clouds and grids share."""

    sigma: float
    steps: int
    labels: bool  # whether all that is diffused is labels
    tol: float  # of row sums


def smooth_cloud(cloud: Cloud, names: list[str], how: How) -> tuple[Cloud, str]:
    """Diffuses positions ("xyz") or attributes of a cloud.

    Returns:
        The cloud with the results in their place, and a remark on what has changed.
    """
    if how.labels and "xyz" in names:
        raise ValueError("--labels needs --signal with the name of an attribute, because positions are no labels.")
    signals = {name: _signal(cloud, name) for name in names}
    q = diffusion(cloud.kernel(how.sigma), mass=cloud.mass, tol=how.tol)
    numbers = {name: values for name, values in signals.items() if not (how.labels or _is_label(name, values))}
    result, remarks = cloud, []
    for name, smooth in _averages(q, how.steps, numbers).items():
        if name == "xyz":
            result = result.moved(smooth)
        else:
            result = result.with_attributes(**{name: _as_before(smooth, cloud.attributes[name])})
    for name, values in signals.items():
        if name in numbers:
            continue
        labels = _votes(q, how.steps, values, name)
        remarks.append(f"; {(labels != cloud.attributes[name]).sum():,} of {len(cloud):,} points change their {name}")
        result = result.with_attributes(**{name: labels})
    moved = np.linalg.norm(result.coordinates - cloud.coordinates, axis=1)
    if moved.any():
        remarks.append(f"; points moved by {moved.mean():.3g} on average, {moved.max():.3g} at most")
    return result, "".join(remarks)


def smooth_grid(grid: Grid, is_boxed: bool, how: How) -> tuple[Grid, str]:
    """Diffuses the values of a grid between its occupied voxels, or over the whole box.

    Returns:
        The grid with the result in its place, all other voxels as they were, and a remark on what has changed.
    """
    domain = np.ones_like(grid.occupied) if is_boxed else grid.occupied
    values = grid.values[domain]
    _check_values(grid, values, is_boxed)
    q = diffusion(VoxelKernel(domain, how.sigma, grid.spacing), tol=how.tol)
    if how.labels:
        smooth = _votes(q, how.steps, values[:, None], "values")
    else:
        smooth = _as_before(_averages(q, how.steps, {"values": values[:, None]})["values"], values)
    result = grid.values.copy()
    result[domain] = smooth
    return grid.with_values(result), f"; {(smooth != values).sum():,} of {len(values):,} voxels changed"


def _check_values(grid: Grid, values: Array, is_boxed: bool) -> None:
    if not is_boxed and (grid.values < 0).any():
        raise ValueError(
            "Some values of the grid are below 0, so that 0 does not tell what is outside. Add --box to diffuse over "
            "the whole box, or set the voxels outside to 0 and the others above it."
        )
    count = int((~np.isfinite(values)).sum())
    if count:
        raise ValueError(
            f"{count} of the {len(values)} voxels are NaN or infinite. Set them to 0, and leave --box out."
        )
    if not is_boxed and values.min() == values.max():
        raise ValueError(
            "All occupied voxels have the same value, which diffusion between them keeps. Add --box to diffuse over "
            "the whole box, so that it mixes with 0."
        )


def _signal(cloud: Cloud, name: str) -> Array:
    """Positions or an attribute as columns (N, C)."""
    if name != "xyz" and name not in cloud.attributes:
        known = ", ".join(["xyz", *cloud.attributes])
        raise ValueError(f"--signal should be one of {known}; got {name!r}.")
    values = cloud.points if name == "xyz" else cloud.attributes[name].reshape(len(cloud), -1)
    count = int((~np.isfinite(values)).any(1).sum())
    if count:
        raise ValueError(f"The attribute `{name}` is NaN or infinite at {count} of the {len(cloud)} points.")
    return values


def _is_label(name: str, values: Array) -> bool:
    return name.lower() in _LABELS and values.shape[1] == 1 and bool((values == np.rint(values)).all())


def _averages(q: Diffusion, steps: int, signals: dict[str, Array]) -> dict[str, Array]:
    """Columns (N, C) by name, all diffused at once.

    Their means are taken off before, so that a constant stays what it is, whatever the row sums.
    """
    if not signals:
        return {}
    means = [values.mean(0, dtype=np.float64) for values in signals.values()]
    columns = [(values - mean).astype(np.float32) for values, mean in zip(signals.values(), means, strict=True)]
    ends = np.cumsum([column.shape[1] for column in columns])[:-1]
    changes = np.split(q.power(steps, np.column_stack(columns)), ends, axis=1)
    return {name: mean + change for name, mean, change in zip(signals, means, changes, strict=True)}


def _votes(q: Diffusion, steps: int, values: Array, name: str) -> Array:
    """The label that weighs most about each point: diffuses indicators of labels (N, 1), and takes the largest."""
    labels, number = np.unique(values, return_inverse=True)
    if values.shape[1] != 1 or len(labels) > _MOST_LABELS or (labels != np.rint(labels)).any():
        raise ValueError(
            f"`{name}` should be labels: one whole number each, of at most {_MOST_LABELS} different ones. "
            "Leave --labels out to average it."
        )
    weight, winner = np.full(len(values), -np.inf), np.zeros(len(values), int)
    for start in range(0, len(labels), _AT_ONCE):
        some = np.arange(start, min(start + _AT_ONCE, len(labels)))
        weights = _averages(q, steps, {name: number.reshape(-1, 1) == some})[name]
        best = weights.max(1)
        winner = np.where(best > weight, start + weights.argmax(1), winner)
        weight = np.maximum(best, weight)
    return labels[winner]


def _as_before(smooth: Array, values: Array) -> Array:
    """In the shape and type of the values before; whole numbers are rounded."""
    if values.dtype.kind != "f":
        smooth = np.clip(np.rint(smooth), values.min(), values.max())
    return smooth.reshape(values.shape).astype(values.dtype)
