"""Kernels, their masses and potentials, and what operators are applied to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn._checks.numbers import as_tensor, finite, floating, shape_of
from qattn._checks.ranks import kind_of_rows, own_part
from qattn.ranks import ALONE

__all__ = [
    "factor_of_kernel",
    "kernel_of",
    "kernels_of_one_size",
    "mass",
    "near_operator",
    "point_kernel",
    "positive_rows",
    "potential",
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
        fits = len({shape[-2:] for shape in shapes}) == 1 and broadcast_shapes(*shapes) is not None
    except RuntimeError:
        fits = False
    if not fits:
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"The kernels of a sum should have one size and batches that broadcast; got {got}.")


def factor_of_kernel(factor: Tensor, batch: torch.Size) -> None:
    """Checks a factor of a kernel of shape (*batch, N, N)."""
    try:
        broadcast_shapes(factor.shape, batch)
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


def near_operator(near: Any, kernel: Any, cloud: Tensor, heads: int) -> Any:
    """The kernel of an operator that a layer of some heads at points (*batch, N, d) may start from."""
    if not isinstance(near.kernel, type(kernel)):
        raise ValueError(
            "`near` should be an operator of a Gaussian kernel at the same points; got one of a "
            f"{type(near.kernel).__name__}."
        )
    if near.kernel.sigma.ndim == 0:  # with content: the points of its kernel are lifted, and do not tell
        shape = (*cloud.shape[:-2], heads, *cloud.shape[-2:-1] * 2)
        if tuple(near.shape) != shape:
            raise ValueError(
                f"`near` should be an operator of bandwidths (H,), or of content with the shape {shape} of this layer, "
                f"as its heads are taken over one by one; got one of shape {tuple(near.shape)}."
            )
    elif not torch.equal(cloud.detach().to(near.kernel.points.dtype), near.kernel.points.detach()):
        raise ValueError("`near` should be an operator of a Gaussian kernel at the same points; these are others.")
    return near.kernel


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
        fits = broadcast_shapes(tensor.shape[:-1], shape[:-2]) == shape[:-2]
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


def positive_rows(lse: Tensor, ranks: Any) -> None:
    """Checks the logarithms of row sums that are to be divided by, on all ranks together."""
    zeros, rows = ranks.sum(torch.tensor([int((lse == -torch.inf).sum()), lse.numel()], device=lse.device)).tolist()
    if zeros:
        raise ValueError(
            f"Each row of the kernel should have a positive sum; {zeros} of {rows} are 0. Leave those sites out, or "
            "give them a similarity to themselves."
        )


def signal(numbers: Any, shape: torch.Size, device: torch.device, ranks: Any = ALONE) -> Tensor:
    """Values (M,), (M, C) or (*batch, M, C) for an operator of shape (*batch, N, M)."""
    tensor = as_tensor("signal", own_part("signal", numbers, -2, ranks))
    tensor = floating("signal", tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.bool else tensor)
    M = shape[-1]
    kind = {"The shape of `signal`": kind_of_rows(tensor, -2), "The dtype of `signal`": tensor.dtype}
    ranks.agree("q @ signal", device, kind)
    axis = -1 if tensor.ndim == 1 else -2
    if tensor.ndim == 0 or tensor.shape[axis] != M:
        raise ValueError(
            f"`signal` should have shape ({M},), ({M}, C) or (*batch, {M}, C), one row a point; got {shape_of(tensor)}."
        )
    if tensor.device != device:
        raise ValueError(f"`signal` should be on {device}, where the operator is; got {tensor.device}.")
    return tensor
