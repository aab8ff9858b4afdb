"""Single numbers, words and tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_tensor", "floating", "integer", "not_negative", "one_of", "positive"]


def shape_of(tensor: Tensor) -> str:
    """A shape as messages show it."""
    return str(tuple(tensor.shape))


def finite(name: str, tensor: Tensor, remedy: str) -> None:
    """Checks that a tensor has neither NaN nor infinity."""
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise ValueError(
            f"`{name}` should be finite; {count} of its {tensor.numel()} numbers are NaN or infinite. {remedy}"
        )


def as_tensor(name: str, numbers: Any) -> Tensor:
    """Anything array-like as a tensor."""
    if hasattr(numbers, "to_local"):
        raise ValueError(f"`{name}` is a DTensor, which a `ShardedGaussian` takes. Give `{name}.full_tensor()` here.")
    if isinstance(numbers, Tensor):
        return numbers
    try:
        array = np.asarray(numbers)
        # Torch knows neither the other byte order, nor strides below 0, nor arrays that may not be written to.
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError):
        what = f"an array of {numbers.dtype}" if isinstance(numbers, np.ndarray) else type(numbers).__name__
        raise TypeError(f"`{name}` should be a tensor or an array of numbers; got {what}.") from None


def floating_tensor(name: str, tensor: Any, least_axes: int, axes: str) -> None:
    """Checks what has to be a tensor already."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` should be a torch.Tensor; got {type(tensor).__name__}. Convert it with `torch.as_tensor`."
        )
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`{name}` should be of floating point; got {dtype}. Convert it with `{name}.float()`.")
    if tensor.ndim < least_axes:
        raise ValueError(
            f"`{name}` should have shape {axes}; got {shape_of(tensor)}. Add the missing axis, as in `{name}[None]`."
        )


def floating(name: str, numbers: Any) -> Tensor:
    """Anything array-like as a tensor of floating point; integers are converted."""
    tensor = as_tensor(name, numbers)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"`{name}` should be real numbers; got {str(tensor.dtype).removeprefix('torch.')}.")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks a word."""
    if value not in choices:
        raise ValueError(f"`{name}` should be {' or '.join(map(repr, choices))}; got {value!r}.")


def positive(name: str, number: Any) -> None:
    """Checks a number or a tensor of them."""
    numbers = as_tensor(name.strip("`"), number)
    if not ((numbers > 0) & (numbers < torch.inf)).all():
        raise ValueError(
            f"{name} should be positive and finite; got {number if numbers.numel() == 1 else 'some that are not'}."
        )


def not_negative(name: str, number: float) -> float:
    """Checks a number that may be 0."""
    if not 0 <= number < float("inf"):
        raise ValueError(f"`{name}` should be 0 or more, and finite; got {number}.")
    return float(number)


def integer(name: str, number: Any, least: int) -> int:
    """Checks a count."""
    if isinstance(number, bool) or int(number) != number or number < least:
        raise ValueError(f"`{name}` should be an integer of at least {least}; got {number}.")
    return int(number)
