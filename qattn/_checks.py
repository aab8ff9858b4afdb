"""Checks of public arguments that several modules share. Messages name what was expected, what came, and a remedy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qattn._types import ArrayLike, dtype_name
from qattn.ranks import ALONE, Ranks, kind_of_rows

__all__ = [
    "as_tensor",
    "bandwidth",
    "finite",
    "floating",
    "floating_tensor",
    "integer",
    "integers",
    "not_negative",
    "one_bandwidth",
    "one_cloud",
    "one_item",
    "one_of",
    "points",
    "positive",
    "shape_of",
    "signal",
]


def shape_of(tensor: Tensor) -> str:
    """Write the shape of a tensor as a tuple, for messages."""
    return str(tuple(tensor.shape))


def finite(name: str, tensor: Tensor, remedy: str) -> None:
    """Check that a tensor has neither NaN nor infinity."""
    # A sum is fast, and finite only if all of its terms are. It may overflow.
    if not tensor.sum().isfinite() and not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise ValueError(
            f"`{name}` should be finite; {count} of its {tensor.numel()} numbers are NaN or infinite. {remedy}"
        )


def as_tensor(name: str, numbers: ArrayLike) -> Tensor:
    """Convert anything array-like to a tensor."""
    if hasattr(numbers, "to_local"):
        raise ValueError(
            f"`{name}` is a DTensor, but the points of the kernel are not. Shard those too, or pass "
            f"`{name}.full_tensor()`."
        )
    if isinstance(numbers, Tensor):
        _refuse_transforms(numbers)
        return numbers
    try:
        array = np.asarray(numbers)
        # Torch supports neither the other byte order, nor negative strides, nor read-only arrays.
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError):
        got = f"an array of {numbers.dtype}" if isinstance(numbers, np.ndarray) else type(numbers).__name__
        raise TypeError(f"`{name}` should be a tensor or an array of numbers; got {got}.") from None


def _refuse_transforms(tensor: Tensor) -> None:
    """Raise if a tensor is wrapped by torch.func, as compiled loops cannot unwrap it."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            "qattn does not run inside torch.func (vmap, grad, jacrev, jvp). Use leading axes for batches, and "
            "differentiate with torch.autograd: `torch.autograd.grad` or `torch.autograd.functional.jacobian`."
        )


def floating_tensor(name: str, tensor: object, least_axes: int, axes: str) -> None:
    """Check that an argument is a tensor of floating point with at least `least_axes` axes, named in `axes`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` should be a torch.Tensor; got {type(tensor).__name__}. Convert it with `torch.as_tensor`."
        )
    _refuse_transforms(tensor)
    if not tensor.is_floating_point():
        got = dtype_name(tensor.dtype)
        raise ValueError(f"`{name}` should be of floating point; got {got}. Convert it with `{name}.float()`.")
    if tensor.ndim < least_axes:
        raise ValueError(
            f"`{name}` should have shape {axes}; got {shape_of(tensor)}. Add the missing axis, as in `{name}[None]`."
        )


def floating(name: str, numbers: ArrayLike) -> Tensor:
    """Convert anything array-like to a tensor of floating point."""
    tensor = as_tensor(name, numbers)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"`{name}` should be real numbers; got {dtype_name(tensor.dtype)}.")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def integers(name: str, numbers: ArrayLike, meaning: str) -> Tensor:
    """Convert integers, which messages describe by their meaning, to a tensor of int64."""
    tensor = as_tensor(name, numbers)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"`{name}` should be integers, {meaning}; got {dtype_name(tensor.dtype)}.")
    return tensor.long()


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Check that an option is one of several words."""
    if value not in choices:
        raise ValueError(f"`{name}` should be {' or '.join(map(repr, choices))}; got {value!r}.")


def positive(name: str, number: ArrayLike) -> None:
    """Check that a number, or each of several, is positive and finite; `name` contains its backticks, if any."""
    numbers = as_tensor(name.strip("`"), number)
    if not ((numbers > 0) & (numbers < torch.inf)).all():
        raise ValueError(
            f"{name} should be positive and finite; got {number if numbers.numel() == 1 else 'some that are not'}."
        )


def not_negative(name: str, number: float) -> float:
    """Check that a number is finite and not negative."""
    if not 0 <= number < float("inf"):
        raise ValueError(f"`{name}` should be 0 or more, and finite; got {number}.")
    return float(number)


def integer(name: str, number: float, least: int) -> int:
    """Check that a number is an integer of at least `least`."""
    if isinstance(number, bool) or int(number) != number or number < least:
        raise ValueError(f"`{name}` should be an integer of at least {least}; got {number}.")
    return int(number)


def points(name: str, numbers: ArrayLike, dimensions: Sequence[int] = (), *, least: int = 1) -> Tensor:
    """Convert positions to a tensor (*batch, N, d) with N ≥ `least`, and with d in `dimensions`, unless empty."""
    tensor = floating(name, numbers)
    if tensor.ndim < 2:
        raise ValueError(
            f"`{name}` should have shape (*batch, N, d); got {shape_of(tensor)}. "
            f"For points on a line, use `{name}[:, None]`."
        )
    if tensor.shape[-2] < least or tensor.shape[-1] == 0:
        count = "one point" if least < 2 else f"{least} points"
        raise ValueError(f"`{name}` should hold at least {count} with one coordinate; got shape {shape_of(tensor)}.")
    if dimensions and tensor.shape[-1] not in dimensions:
        expected = " or ".join(f"(*batch, N, {d})" for d in dimensions)
        raise ValueError(f"`{name}` should have shape {expected}; got {shape_of(tensor)}.")
    finite(name, tensor, "Drop those points first, or set them to 0 and give them mass 0.")
    return tensor


def one_cloud(name: str, numbers: ArrayLike, dimensions: Sequence[int] = (), *, least: int = 1) -> Tensor:
    """Convert positions to a tensor (N, d), as `points` does."""
    tensor = points(name, numbers, dimensions, least=least)
    if tensor.ndim > 2:
        raise ValueError(
            f"`{name}` should have shape (N, d), one cloud; got {shape_of(tensor)}. Take one, as in `{name}[0]`."
        )
    return tensor


def one_item(call: str, shape: torch.Size, remedy: str) -> None:
    """Check that an operator of shape (*batch, N, N) has no batch axes, for a call that takes none."""
    if len(shape) > 2:
        raise ValueError(
            f"`{call}` takes one cloud with one bandwidth; this operator has shape {tuple(shape)}. "
            f"Take one item first, as in `{remedy}`."
        )


def bandwidth(sigma: ArrayLike, cloud: Tensor) -> Tensor:
    """Convert σ to a scalar tensor or (H,), in the dtype of the log-sum-exp for points `cloud`."""
    dtype = torch.promote_types(cloud.dtype, torch.float32)
    tensor = as_tensor("sigma", sigma).to(cloud.device, dtype)
    if tensor.ndim > 1:
        raise ValueError(
            f"`sigma` should be a number, or of shape (H,) for one head per bandwidth; got {shape_of(tensor)}."
        )
    positive("`sigma`", tensor.detach() if tensor.ndim else float(tensor.detach()))
    return tensor


def one_bandwidth(sigma: ArrayLike, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert σ to a scalar tensor."""
    tensor = as_tensor("sigma", sigma).to(device, dtype)
    if tensor.ndim > 0:
        raise ValueError(
            f"`sigma` should be one number; got shape {shape_of(tensor)}. Make one kernel per bandwidth, and use them "
            "separately or add them."
        )
    positive("`sigma`", float(tensor.detach()))
    return tensor


def signal(numbers: ArrayLike, shape: torch.Size, device: torch.device, ranks: Ranks = ALONE) -> Tensor:
    """Convert a signal to a tensor (M,), (M, C) or (*batch, M, C), for an operator of shape (*batch, N, M)."""
    tensor = as_tensor("signal", ranks.local_part("signal", numbers, -2))
    tensor = floating("signal", tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.bool else tensor)
    M = shape[-1]
    kind = {"The shape of `signal`": kind_of_rows(tensor, -2), "The dtype of `signal`": tensor.dtype}
    ranks.agree("@", device, kind)
    axis = -1 if tensor.ndim == 1 else -2
    if tensor.ndim == 0 or tensor.shape[axis] != M:
        raise ValueError(
            f"`signal` should have shape ({M},), ({M}, C) or (*batch, {M}, C), one row per point; "
            f"got {shape_of(tensor)}."
        )
    if tensor.device != device:
        raise ValueError(f"`signal` should be on {device}, where the operator is; got {tensor.device}.")
    return tensor
