"""What layers are made of and called with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qattn._checks.numbers import floating_tensor, integer, positive, shape_of

__all__ = [
    "channels",
    "chiral",
    "chiral_points",
    "divisible",
    "dtype_of_parameters",
    "features_at_points",
    "gradients",
    "heads",
    "point_record",
    "range_of_bandwidths",
]


def range_of_bandwidths(sigma: Any) -> tuple[float, float]:
    """The least and the largest bandwidth."""
    try:
        low, high = (float(number) for number in sigma)
    except (TypeError, ValueError):
        raise ValueError(
            f"`sigma` should be a pair, the least and the largest bandwidth in the unit of the points; got {sigma!r}."
        ) from None
    positive("the least bandwidth", low)
    if not low <= high < float("inf"):
        raise ValueError(f"`sigma` should be a pair (least, largest) of finite bandwidths; got {sigma!r}.")
    return low, high


def divisible(name: str, number: int, other_name: str, other: int) -> None:
    integer(name, number, 1)
    if number % integer(other_name, other, 1):
        raise ValueError(f"`{name}` should be a multiple of `{other_name}`; got {number} and {other}.")


def channels(name: str, tensor: Tensor, count: int) -> None:
    if tensor.shape[-1] != count:
        raise ValueError(f"`{name}` should have {count} channels, as this module was made for; got {shape_of(tensor)}.")


def heads(signal: Tensor, count: int, cloud: Tensor) -> None:
    """Checks a signal (*batch, H, N, P) at points (*batch, N, d)."""
    if signal.ndim < 3 or signal.shape[-3] != count or signal.shape[-2] != cloud.shape[-2]:
        raise ValueError(
            f"`signal` should have shape (*batch, {count}, {cloud.shape[-2]}, P), one set of channels a bandwidth, for "
            f"points {shape_of(cloud)}; got {shape_of(signal)}."
        )


def features_at_points(features: Any, points: Any, mass: Any, is_packed: bool) -> Tensor:
    """The points of features (N, C) or (B, N, C), with masses of the same layout or none."""
    floating_tensor("features", features, 2, "(N, C) or (B, N, C)")
    if points is None:
        raise ValueError("`points` should be given with features: their positions, in the same layout.")
    floating_tensor("points", points, 2, "(N, d) or (B, N, d)")
    axes = 2 if is_packed else min(features.ndim, 3)
    if features.ndim != axes or points.shape[:-1] != features.shape[:-1]:
        wanted = (
            "(T, C) and (T, d) with `offset` or `batch`" if is_packed else "(N, C) and (N, d), or with a batch axis"
        )
        raise ValueError(
            f"`features` and `points` should have shapes {wanted}; got {shape_of(features)} and {shape_of(points)}."
        )
    if mass is not None and mass.shape != features.shape[:-1]:
        raise ValueError(
            f"`mass` should have one number a point, shape {tuple(features.shape[:-1])}; got {shape_of(mass)}."
        )
    return points


def point_record(features: str | None, names: Sequence[str], has_clouds: bool, others: Sequence[Any]) -> None:
    """Checks a dict or an object with features at points, which comes alone; `names` are what it has."""
    got = f"got {', '.join(map(str, names)) or 'none'}."
    if features is None:
        raise ValueError(
            f"A dict or an object should have `feat` and `coord`, as Pointcept's, or `x` and `pos`, as PyG's; {got}"
        )
    if features == "feat" and not has_clouds:
        raise ValueError(f"A dict with `feat` and `coord` should have one of `offset` and `batch` too; {got}")
    if any(other is not None for other in others):
        raise ValueError("With a dict or an object, points, masses and clouds come in it; give no others beside it.")


def dtype_of_parameters(features: Tensor, parameters: torch.dtype) -> None:
    """Checks features for layers whose parameters have a dtype; under autocast, which casts, others than float64 do."""
    is_cast = torch.is_autocast_enabled(features.device.type) and features.dtype != torch.float64
    if features.dtype != parameters and not is_cast:
        wanted, got = (str(dtype).removeprefix("torch.") for dtype in (parameters, features.dtype))
        raise ValueError(
            f"`features` should be {wanted}, as the parameters are; got {got}. Convert them with "
            f"`features.to(torch.{wanted})`, or the module with `module.to(torch.{got})`."
        )


def chiral_points(points: Tensor) -> None:
    """Checks points for a network that takes volumes of gradients."""
    if points.shape[-1] != 3:
        raise ValueError(
            "`points` should have 3 coordinates, as `chiral=True` takes volumes of gradients in space; got shape "
            f"{shape_of(points)}."
        )


def chiral(gradient: str) -> None:
    """Checks where a network that is to tell left from right takes gradients from."""
    if gradient != "attention":
        raise ValueError(f'`chiral` needs gradients in space, `gradient="attention"`; got {gradient!r}.')


def gradients(given: Any, is_needed: bool, features: Tensor) -> None:
    """Checks gradX and gradY for features (B, N, C)."""
    if (given is not None) != is_needed:
        remedy = "Give those of `tangent_gradients`" if is_needed else 'Leave them out, or set `gradient="tangent"`'
        raise ValueError(f'`gradients` are for a network made with `gradient="tangent"`, which needs them. {remedy}.')
    for matrix in given or ():
        matrices = [matrix] if isinstance(matrix, Tensor) and matrix.ndim == 2 else list(matrix)
        wanted = (1, len(features)) if isinstance(matrix, Tensor) and matrix.ndim == 2 else (len(features),)
        sizes = [m.shape for m in matrices]
        if len(matrices) not in wanted or any(s[0] != s[1] or s[0] > features.shape[1] for s in sizes):
            raise ValueError(
                f"`gradients` should be matrices (N, N) for all clouds, or one for each of the {len(features)} clouds, "
                f"of at most {features.shape[1]} points; got {[tuple(s) for s in sizes]}."
            )
