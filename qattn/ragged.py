"""Batches of clouds of different sizes, packed or padded.

A packed batch concatenates the points of all clouds. It comes with `offset`, the end of each cloud (Pointcept: no
leading 0), or with `batch`, the sorted index of the cloud of each point (PyG). A padded batch has one row per cloud;
padding needs mass 0 and nothing else, because a point without mass influences no other.
"""

import torch
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike

__all__ = ["to_packed", "to_padded"]


def to_padded(
    packed: Tensor, *, offset: ArrayLike | None = None, batch: ArrayLike | None = None
) -> tuple[Tensor, Tensor]:
    """Pad a packed batch with zeros.

    Args:
        packed: Points, features or masses of all clouds, shape (T, …).
        offset: End of each cloud, integers of shape (B,), as in Pointcept. Give either `offset` or `batch`.
        batch: Index of the cloud of each row, sorted integers of shape (T,), as in PyG.

    Returns:
        The padded batch, shape (B, N, …) with N the size of the largest cloud, and a mask of shape (B, N), True where a
        row is present.

    Raises:
        ValueError: Both or none of `offset` and `batch` are given, or they do not fit `packed`.

    Examples:
        >>> padded, present = to_padded(torch.arange(5.0), offset=torch.tensor([2, 5]))
        >>> padded
        tensor([[0., 1., 0.],
                [2., 3., 4.]])
    """
    sizes = _cloud_sizes(packed, offset, batch)
    present = torch.arange(int(sizes.max()), device=packed.device) < sizes[:, None]  # (B, N)
    padded = packed.new_zeros(*present.shape, *packed.shape[1:])
    padded[present] = packed
    return padded, present


def to_packed(padded: Tensor, present: Tensor) -> Tensor:
    """Invert `to_padded`.

    Args:
        padded: Rows of shape (B, N, …), with padding.
        present: Mask of shape (B, N), False for padding.

    Returns:
        The rows that are present, one cloud after the other, shape (T, …).
    """
    return padded[present]


def _cloud_sizes(packed: Tensor, offset: ArrayLike | None, batch: ArrayLike | None) -> Tensor:
    """Return the number of points of each cloud, shape (B,)."""
    num_rows = len(packed)
    if offset is not None and batch is None:
        ends = _checks.integers("offset", offset, "the end of each cloud").to(packed.device)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        if ends.ndim != 1 or len(ends) == 0 or int(ends[-1]) != num_rows or (sizes < 0).any():
            raise ValueError(
                f"`offset` should rise to the number of rows, {num_rows}, without a leading 0; "
                f"got {ends.tolist()[:8]}. From `cu_seqlens`, take `cu_seqlens[1:]`."
            )
        return sizes
    if batch is not None and offset is None:
        index = _checks.integers("batch", batch, "the cloud of each row").to(packed.device)
        if index.shape != (num_rows,) or num_rows == 0 or (torch.diff(index) < 0).any() or int(index[0]) < 0:
            raise ValueError(
                f"`batch` should be sorted, from 0, with one number per row, shape ({num_rows},); "
                f"got shape {_checks.shape_of(index)}."
            )
        return torch.bincount(index)
    raise ValueError("Give either `offset`, the end of each cloud, or `batch`, the cloud of each row.")
