"""Conversion of features at points between common layouts and one padded batch.

| layout | features | points | clouds are separated by |
|---|---|---|---|
| one cloud | (N, C) | (N, d) | |
| a batch | (B, N, C) | (B, N, d) | padding of mass 0 |
| packed | (T, C) | (T, d) | `offset`, the end of each cloud, or `batch`, the cloud of each point |
| a dict, as in Pointcept | `feat` | `coord` | `offset` or `batch`; masses, if any, are `mass` |
| an object or a dict, as in PyG | `x` | `pos` | `batch`, or one cloud; masses, if any, are `mass` |

Records are recognized by these names; neither library is imported.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qattn import _checks
from qattn._types import ArrayLike, dtype_name
from qattn.ragged import to_packed, to_padded
from qattn.ranks import Ranks

__all__ = ["Features", "PaddedClouds", "check_channels"]

Features = TypeVar("Features")
"""A tensor, a dict or an object; results are of the type of the features."""

_RECORDS = {"feat": "coord", "x": "pos"}  # names of features, and of the points that come with them
_NAMES = ("feat", "coord", "x", "pos", "offset", "batch", "mass")


@dataclass(frozen=True)
class PaddedClouds:
    """A batch of clouds, padded to one size with points of mass 0.

    Attributes:
        features: Shape (B, N, C).
        points: Shape (B, N, d). Padding repeats a point of its cloud.
        mass: Shape (B, N), with sum 1 in each cloud unless it was given.
        restore: Function that converts features (B, N, C') at the points, or (B, C') of clouds, back to the layout.
    """

    features: Tensor
    points: Tensor
    mass: Tensor
    restore: Callable[[Tensor], Any]

    @staticmethod
    def of(
        features: Any,
        points: Tensor | None,
        mass: Tensor | None,
        offset: ArrayLike | None,
        batch: ArrayLike | None,
        module: nn.Module,
        ranks: Ranks,
    ) -> "PaddedClouds":
        """Pad features at points in any layout, for a module with parameters of one dtype."""
        if _is_record(features):
            record, name = features, _record_name(features, (points, mass, offset, batch))
            features, points, mass = (_get(record, n) for n in (name, _RECORDS[name], "mass"))
            offset, batch = _get(record, "offset"), _get(record, "batch") if _get(record, "offset") is None else None
            clouds = PaddedClouds.of(features, points, mass, offset, batch, module, ranks)
            restore = clouds.restore
            return PaddedClouds(
                clouds.features, clouds.points, clouds.mass, lambda out: _replaced(record, name, restore(out))
            )
        is_packed = offset is not None or batch is not None
        points = _checked_points(features, points, mass, is_packed)
        _check_dtype(features, module)
        if is_packed:
            padded, present = to_padded(features, offset=offset, batch=batch)
            _check_counts(ranks.total(present.long()), "batch" if offset is None else "offset")
            x = to_padded(points, offset=offset, batch=batch)[0]
            x = torch.where(present[..., None], x, x[:, :1])
            m = present.to(x) if mass is None else to_padded(mass, offset=offset, batch=batch)[0]
            m = m / ranks.total(m)[..., None].clamp(min=1e-30)
            return PaddedClouds(padded, x, m, lambda out: to_packed(out, present) if out.ndim == 3 else out)
        if mass is None:
            ones = torch.ones(points.shape[:-1], dtype=points.dtype, device=points.device)
            mass = ones / ranks.total(ones)[..., None]
        if features.ndim == 3:
            return PaddedClouds(features, points, mass, lambda out: out)
        return PaddedClouds(features[None], points[None], mass[None], lambda out: out[0])


def check_channels(name: str, tensor: Tensor, count: int) -> None:
    """Check the size of the last axis."""
    if tensor.shape[-1] != count:
        raise ValueError(
            f"`{name}` should have {count} channels, for which this module was made; got {_checks.shape_of(tensor)}."
        )


def _is_record(features: Any) -> bool:
    return not isinstance(features, Tensor) and (isinstance(features, Mapping) or hasattr(features, "pos"))


def _get(record: Any, name: str) -> Any:
    """Return an entry of a dict or an attribute of an object, or None."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def _record_name(record: Any, others: Sequence[Any]) -> str:
    """Return the name of the features of a record, which excludes all other arguments."""
    names = [name for name in _NAMES if _get(record, name) is not None]
    got = f"got {', '.join(names) or 'none'}."
    name = next((name for name, points in _RECORDS.items() if name in names and points in names), None)
    if name is None:
        raise ValueError(
            "`features` that are a dict or an object should have `feat` and `coord`, as in Pointcept, or `x` and "
            f"`pos`, as in PyG; {got}"
        )
    if name == "feat" and "offset" not in names and "batch" not in names:
        raise ValueError(f"`features` with `feat` and `coord` should also have `offset` or `batch`; {got}")
    if any(other is not None for other in others):
        raise ValueError("`features` that are a dict or an object hold points, masses and clouds. Pass no others.")
    return name


def _replaced(record: Any, name: str, features: Any) -> Any:
    """Return a copy of a record with new features."""
    new = copy.copy(record)
    if isinstance(new, Mapping):
        new[name] = features  # type: ignore[index]
    else:
        setattr(new, name, features)
    return new


def _checked_points(features: Tensor, points: Tensor | None, mass: Tensor | None, is_packed: bool) -> Tensor:
    """Check features (N, C) or (B, N, C), their points and masses; return the points."""
    _checks.floating_tensor("features", features, 2, "(N, C) or (B, N, C)")
    if points is None:
        raise ValueError("`points` should be given with features: their positions, in the same layout.")
    _checks.floating_tensor("points", points, 2, "(N, d) or (B, N, d)")
    axes = 2 if is_packed else min(features.ndim, 3)
    if features.ndim != axes or points.shape[:-1] != features.shape[:-1]:
        shapes = (
            "(T, C) and (T, d) with `offset` or `batch`" if is_packed else "(N, C) and (N, d), or with a batch axis"
        )
        raise ValueError(
            f"`features` and `points` should have shapes {shapes}; got {_checks.shape_of(features)} and "
            f"{_checks.shape_of(points)}."
        )
    if mass is not None and mass.shape != features.shape[:-1]:
        raise ValueError(
            f"`mass` should have one number per point, shape {tuple(features.shape[:-1])}; "
            f"got {_checks.shape_of(mass)}."
        )
    return points


def _check_dtype(features: Tensor, module: nn.Module) -> None:
    """Check that features have the dtype of the parameters, or one that autocast converts."""
    parameter = next(module.parameters(), None)
    is_cast = torch.is_autocast_enabled(features.device.type) and features.dtype != torch.float64
    if parameter is not None and features.dtype != parameter.dtype and not is_cast:
        expected, got = (dtype_name(x.dtype) for x in (parameter, features))
        raise ValueError(
            f"`features` should be {expected}, like the parameters; got {got}. Convert them with "
            f"`features.to(torch.{expected})`, or the module with `module.to(torch.{got})`."
        )


def _check_counts(counts: Tensor, name: str) -> None:
    """Check that packed clouds have numbers of points (B,) above 0."""
    if (counts == 0).any():
        empty = ", ".join(map(str, (counts == 0).nonzero()[:, 0].tolist()))
        raise ValueError(
            f"`{name}` should describe clouds with at least one point; of {len(counts)} clouds, those with index "
            f"{empty} have none. Leave them out."
        )
