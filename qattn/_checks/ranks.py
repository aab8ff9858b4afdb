"""Clouds that lie over several processes."""

from collections.abc import Sequence
from typing import Any

__all__ = ["all_or_none_sharded", "held_alone", "same_on_all_ranks"]


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


def same_on_all_ranks(name: str, numbers: Sequence[Sequence[float]]) -> None:
    """Checks what all ranks should have given alike, one row of numbers a rank."""
    if any(list(row) != list(numbers[0]) for row in numbers):
        raise ValueError(
            f"{name} should be the same on all ranks; got {', '.join(str(list(row)) for row in numbers)}. "
            "A rank without points gives an empty shard, of shape (*batch, 0, d)."
        )
