"""Broadcasting of shapes and indices; `torch.broadcast_shapes` would import SymPy for half a second."""

from collections.abc import Sequence
from itertools import zip_longest

import torch

__all__ = ["Index", "broadcast_shapes", "own_index"]

Index = tuple[int | slice, ...]  # one entry per batch axis; integers are not negative


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape to which tensors of these shapes broadcast.

    Raises:
        RuntimeError: If they do not broadcast.

    Examples:
        >>> broadcast_shapes((5, 1), (3,), ())
        torch.Size([5, 3])
    """
    sizes = []
    for column in zip_longest(*(tuple(shape)[::-1] for shape in shapes), fillvalue=1):
        size = next((n for n in column if n != 1), 1)
        if any(n not in (1, size) for n in column):
            raise RuntimeError(f"Shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast.")
        sizes.append(size)
    return torch.Size(sizes[::-1])


def own_index(index: Index, batch: Sequence[int]) -> Index:
    """Return the entries of an index that apply to `batch`, axes that broadcast to those of the index.

    Examples:
        >>> own_index((4, slice(2), 3), (1, 7))
        (slice(None, None, None), 3)
    """
    entries = index[len(index) - len(batch) :]
    repeated = (0 if isinstance(entry, int) else slice(None) for entry in entries)
    return tuple(mine if n == 1 else entry for entry, mine, n in zip(entries, repeated, batch, strict=True))
