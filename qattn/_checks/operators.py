"""Kernels, their masses and potentials, and what operators are applied to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qattn._checks.numbers import finite, floating, shape_of
from qattn._checks.ranks import own_part
from qattn.ranks import ALONE

__all__ = [
    "factor_of_kernel",
    "kernel_of",
    "kernels_of_one_size",
    "mass",
    "point_kernel",
    "positive_rows",
    "potential",
    "same_points",
    "signal",
    "with_gradients",
]


def kernel_of(given: Any, sigma: Any, options: dict[str, Any], kind: type, gaussian: Callable[..., Any]) -> Any:
    """A kernel as given, or the Gaussian one of points with a bandwidth."""
    if isinstance(given, kind):
        if sigma is not None or options:
            extra = ", ".join(["sigma"] * (sigma is not None) + list(options))
            raise ValueError(f"{extra} belong to the kernel, which is given already. Set them when making it.")
        return given
    if sigma is None:
        raise ValueError("`sigma` should be given with points: the bandwidth, in units of the points.")
    return gaussian(given, sigma, **options)


def kernels_of_one_size(shapes: Sequence[torch.Size]) -> None:
    """Checks the terms of a sum."""
    try:
        fits = len({shape[-2:] for shape in shapes}) == 1 and torch.broadcast_shapes(*shapes) is not None
    except RuntimeError:
        fits = False
    if not fits:
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"The kernels of a sum should have one size and batches that broadcast; got {got}.")


def factor_of_kernel(factor: Tensor, batch: torch.Size) -> None:
    """Checks a factor of a kernel of shape (*batch, N, N)."""
    try:
        torch.broadcast_shapes(factor.shape, batch)
    except RuntimeError:
        raise ValueError(
            f"The factor of a kernel should be a number, or broadcast with its batch axes {tuple(batch)}; "
            f"got shape {shape_of(factor)}."
        ) from None


def point_kernel(kernel: Any, kind: type) -> Any:
    """A kernel that can be evaluated at other points, or why it cannot."""
    if not isinstance(kernel, kind):
        raise ValueError(f"{kernel!r} is not a function of points, so it cannot be evaluated at other ones.")
    return kernel


def same_points(kernel: Any, other: Any, kind: type) -> Any:
    """The other kernel, if it is of a kind and at the same points."""
    if not isinstance(other, kind) or not torch.equal(kernel.points.detach(), other.points.detach()):  # type: ignore[attr-defined]
        raise ValueError("`near` should be an operator of a Gaussian kernel at the same points; these are others.")
    return other


def with_gradients(kernel: Any, kind: type, normalization: str) -> Any:
    """A kernel whose smoothed signals have gradients in space."""
    if not isinstance(kernel, kind) or normalization not in ("sinkhorn", "row"):
        raise ValueError(
            "`value_and_gradient` is for Gaussian kernels of points with the normalization sinkhorn or row; "
            f"got {type(kernel).__name__} with {normalization}."
        )
    return kernel


def mass(numbers: Any, kernel: Any) -> Tensor:
    """Masses (*batch, N) ≥ 0 with a positive sum, for a kernel of shape (*batch, N, N); 1/N each by default."""
    shape, N = kernel.shape, kernel.shape[-1]
    if numbers is None:
        return torch.full((N,), 1 / N, dtype=kernel.dtype, device=kernel.device)
    tensor = floating("mass", own_part("mass", numbers, -1, kernel.ranks)).to(kernel.device, kernel.dtype)
    if tensor.ndim == 0 or tensor.shape[-1] != N:
        raise ValueError(
            f"`mass` should have shape {(*shape[:-2], N)}, one mass a point, or one that broadcasts to it; "
            f"got {shape_of(tensor)}. Leave it out for equal masses."
        )
    try:
        fits = torch.broadcast_shapes(tensor.shape[:-1], shape[:-2]) == shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"`mass` should broadcast to the shape {(*shape[:-2], N)} of the points; got {shape_of(tensor)}. "
            "With heads, masses of a batch need an axis for them: `mass[..., None, :]`."
        )
    finite("mass", tensor, "Points without mass get 0.")
    if (tensor < 0).any():
        raise ValueError(
            f"`mass` should not be negative; {int((tensor < 0).sum())} of its {tensor.numel()} numbers are."
        )
    if (kernel.ranks.total(tensor.detach()) == 0).any():
        raise ValueError("`mass` should have a positive sum in each cloud; it is all 0 in at least one.")
    return tensor


def potential(numbers: Any, kernel: Any) -> Tensor:
    """A potential to start from, (*batch, N), for a kernel of shape (*batch, N, N)."""
    tensor = floating("init", own_part("init", numbers, -1, kernel.ranks)).to(kernel.device, kernel.dtype)
    shape = kernel.shape[:-1]
    if tensor.shape != shape:
        raise ValueError(
            f"`init` should have shape {tuple(shape)}, a potential of the same kernel; got {shape_of(tensor)}."
        )
    finite("init", tensor, "Start without it.")
    return tensor


def positive_rows(lse: Tensor) -> None:
    """Checks the logarithms of row sums that are to be divided by."""
    if (lse == -torch.inf).any():
        raise ValueError(
            f"Each row of the kernel should have a positive sum; {int((lse == -torch.inf).sum())} of {lse.numel()} "
            "are 0. Leave those sites out, or give them a similarity to themselves."
        )


def signal(numbers: Any, shape: torch.Size, device: torch.device, ranks: Any = ALONE) -> Tensor:
    """Values (M,), (M, C) or (*batch, M, C) for an operator of shape (*batch, N, M)."""
    tensor = floating("signal", own_part("signal", numbers, -2, ranks))
    M = shape[-1]
    axis = -1 if tensor.ndim == 1 else -2
    if tensor.ndim == 0 or tensor.shape[axis] != M:
        raise ValueError(
            f"`signal` should have shape ({M},), ({M}, C) or (*batch, {M}, C), one row a point; got {shape_of(tensor)}."
        )
    if tensor.device != device:
        raise ValueError(f"`signal` should be on {device}, where the operator is; got {tensor.device}.")
    return tensor
