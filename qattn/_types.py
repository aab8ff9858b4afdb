"""Types of arguments, and conversion of results to the type of an argument."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["ArrayLike", "MassLike", "TensorOrArray", "dtype_name", "like_input"]

ArrayLike: TypeAlias = Tensor | np.ndarray | Sequence[Any] | float
"""A tensor, or anything that `numpy.asarray` makes an array of numbers."""

TensorOrArray: TypeAlias = Any
"""A tensor or an array, as an input is; for type checkers `Any`, because only callers know which of the two."""

MassLike: TypeAlias = ArrayLike | Literal["density"]
"""Masses, or the name of a way to find them."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def like_input(result: Tensor, given: ArrayLike) -> TensorOrArray:
    """Return `result` unchanged if `given` is a tensor, else as an array.

    Examples:
        >>> like_input(torch.ones(2), [1.0, 2.0])
        array([1., 1.], dtype=float32)
    """
    return result if isinstance(given, Tensor) else result.numpy(force=True)
