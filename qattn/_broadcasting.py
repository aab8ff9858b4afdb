"""Broadcasting of shapes without `torch.broadcast_shapes`, whose first call imports SymPy for half a second."""

from collections.abc import Sequence
from itertools import zip_longest

import torch

__all__ = ["broadcast_shapes"]


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
