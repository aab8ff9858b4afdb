"""Clouds of different sizes in one batch: packed (all points in a row) and padded (mass 0 behind each cloud).

Packed batches come with `offset`, where each cloud ends (Pointcept: no leading 0), or with `batch`, the sorted number
of the cloud of each point (PyG). Zero mass is all that padding needs: such a point influences nothing.
"""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks

__all__ = ["to_packed", "to_padded"]


def to_padded(packed: Tensor, *, offset: Any = None, batch: Any = None) -> tuple[Tensor, Tensor]:
    """Packed rows (T, …) as a padded batch (B, N, …), N the largest cloud, and which rows are present (B, N).

    Args:
        packed: Points, features or masses of all clouds, one after the other.
        offset: Where each cloud ends, shape (B,), as Pointcept has it: a tensor, an array or a list.
        batch: The cloud of each row, shape (T,), sorted, as PyG has it: a tensor, an array or a list.

    Example:
        >>> padded, present = to_padded(torch.arange(5.0), offset=torch.tensor([2, 5]))
        >>> padded
        tensor([[0., 1., 0.],
                [2., 3., 4.]])
    """
    counts = _checks.counts_of_clouds(packed, offset, batch)
    present = torch.arange(int(counts.max()), device=packed.device) < counts[:, None]  # (B, N)
    padded = packed.new_zeros(*present.shape, *packed.shape[1:])
    padded[present] = packed
    return padded, present


def to_packed(padded: Tensor, present: Tensor) -> Tensor:
    """Undoes `to_padded`: the rows (B, N, …) that are present, as (T, …)."""
    return padded[present]
