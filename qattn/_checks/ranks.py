"""Clouds that lie over several processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn._checks.numbers import as_tensor, shape_of

__all__ = ["all_or_none_sharded", "held_alone", "kind_of_rows", "own_part", "rows_of"]


def all_or_none_sharded(are_alone: Sequence[bool]) -> None:
    """Checks the terms of a sum, which may lie on several ranks."""
    if len(set(are_alone)) > 1:
        raise ValueError("The kernels of a sum should all be sharded, or none of them. Make each a `ShardedGaussian`.")


def held_alone(name: str, ranks: Any) -> None:
    """Checks that all sites of a kernel are here."""
    if not ranks.is_alone:
        raise ValueError(
            f"`{name}` needs all sites in one process, and this kernel is sharded over several. Gather its points and "
            "make a `GaussianKernel` of them."
        )


def kind_of_rows(given: Any, axis: int) -> str | None:
    """The shape of an array or a tensor of which each rank has other rows, n along `axis`, and if it has a gradient."""
    if given is None:
        return None
    sizes: list[Any] = list(np.shape(given))
    if sizes:
        sizes[max(axis, -len(sizes))] = "n"
    gradient = ", with gradient" if getattr(given, "requires_grad", False) and torch.is_grad_enabled() else ""
    return f"({', '.join(map(str, sizes))}){gradient}"


def own_part(name: str, given: Any, axis: int, ranks: Any) -> Any:
    """This rank's part of a DTensor that is sharded along an axis, counted from the last; all else as it is."""
    if not hasattr(given, "to_local"):
        return given
    if ranks is not None and ranks.is_alone:
        raise ValueError(
            f"`{name}` is a DTensor, and the kernel has all its sites in one process. Make a `ShardedGaussian` of "
            f"points that are sharded alike, or give `{name}.full_tensor()`."
        )
    axis = max(0, given.ndim + axis)
    if given.device_mesh.ndim != 1 or not given.placements[0].is_shard(axis):
        raise ValueError(
            f"`{name}` should be sharded over a mesh of one axis, a part of the points to each rank; got "
            f"{given.placements}. Take `{name}.redistribute(placements=[Shard({axis})])`."
        )
    return given.to_local()


def rows_of(name: str, given: Any, points: Tensor) -> Tensor:
    """What belongs to points (n, d): one row each, (n,) or (n, C)."""
    tensor = as_tensor(name, given).detach().to(points.device)
    if tensor.ndim not in (1, 2) or len(tensor) != len(points):
        raise ValueError(
            f"`{name}` should have one row a point, shape ({len(points)},) or ({len(points)}, C); "
            f"got {shape_of(tensor)}."
        )
    return tensor
