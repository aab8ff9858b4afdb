"""Kernels scaled from both sides, diag(e^left) K diag(e^right), applied to values.

Arguments are not checked. Sites with `right` = −inf are absent.
"""

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.attended import sized
from qattn.kernels.base import Kernel
from qattn.ranks import Ranks

__all__ = ["apply", "apply_and_sum", "apply_transpose", "has_massless", "log_of_mass", "shares"]


def log_of_mass(mass: Tensor) -> Tensor:
    """Compute log m, with −inf and gradient 0 where the mass is 0."""
    is_positive = mass > 0
    return torch.where(is_positive, torch.log(torch.where(is_positive, mass, 1)), -torch.inf)


def has_massless(mass: Tensor, ranks: Ranks) -> bool:
    """Return whether any point, of any rank, has mass 0."""
    return bool(ranks.largest((mass == 0).to(mass.dtype)).any())


def shares(mass: Tensor, ranks: Ranks) -> Tensor:
    """Divide masses (*batch, N) by their sum, without overflow of the sum."""
    part = mass / ranks.largest(mass)[..., None]
    return part / ranks.total(part)[..., None]


def apply(
    kernel: Kernel,
    left: Tensor,
    right: Tensor,
    value: Tensor,
    *,
    keeps_constants: bool = False,
    all_rows: bool = True,
) -> Tensor:
    """Apply diag(e^left) K diag(e^right) to values (*batch, M, C), which are ignored at absent sites.

    With `keeps_constants`, the potentials depend on the kernel such that the operator preserves constants. Its
    derivative with respect to the kernel is then that of the product with v − c for any constant c. The mean is taken
    as c, so that less cancels. Rows at absent sites are then softmax averages. See `Kernel.attend` for `all_rows`.
    """
    return apply_and_sum(kernel, left, right, value, keeps_constants, all_rows)[0]


def apply_and_sum(
    kernel: Kernel, left: Tensor, right: Tensor, value: Tensor, keeps_constants: bool, all_rows: bool
) -> tuple[Tensor, Tensor]:
    """Apply as `apply` does, and also return the sums (*batch, N) of the operator's rows."""
    is_absent = right == -torch.inf
    if value.device.type != "cpu" or is_absent.any():  # on a GPU, asking would wait for it
        value = torch.where(is_absent[..., None], 0, value)
    dtype, has_gradient = value.dtype, needs_gradient(kernel, left, right)
    constant = None
    if has_gradient:  # gradients should not contain the rounding of averages to 16 bits
        value = value.to(torch.promote_types(dtype, kernel.dtype))
    if has_gradient and keeps_constants:
        constant = kernel.ranks.mean(right.detach(), value.detach())
        value = value - constant
    out, lse = kernel.attend(right, value, all_rows=all_rows)
    assert out is not None
    exponent = left + lse
    if keeps_constants:  # before the exponential, whose derivative may overflow
        exponent = torch.where(is_absent, 0, exponent)
    sums = torch.exp(exponent)
    factor = sums[..., None]
    if constant is None:
        return (factor * out).to(dtype), sums
    return (factor * out + factor.detach() * constant).to(dtype), sums


def needs_gradient(kernel: Kernel, *tensors: Tensor) -> bool:
    """Return whether the kernel or any of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *kernel.tensors))


def apply_transpose(kernel: Kernel, left: Tensor, right: Tensor, value: Tensor, *, all_rows: bool = True) -> Tensor:
    """Apply the transpose diag(e^right) K diag(e^left) to values (*batch, N, C).

    The weights contain the sizes of the values, so that the cut-off accounts for large values at points of small mass.
    Absent sites whose value is 0, such as padding, are left out. Without `all_rows`, rows of sites whose value is 0 are
    only accurate relative to the largest entry of the result.
    """
    value = value.expand(*broadcast_shapes(value.shape[:-2], kernel.shape[:-2]), *value.shape[-2:])
    is_padding = (right == -torch.inf) & (value.detach() == 0).all(-1)
    sizes = torch.where(is_padding, -torch.inf, sized(value)[0])
    sizes = _largest_of(sizes, kernel.shape[:-2])
    scale = torch.exp(-torch.where(sizes == -torch.inf, 0, sizes))[..., None].to(value.dtype)
    return apply(kernel, right, left + sizes, value * scale, all_rows=all_rows)


def _largest_of(x: Tensor, batch: torch.Size) -> Tensor:
    """Reduce x (…, N) by maximum over axes that `batch` lacks, to a shape that broadcasts to (*batch, N)."""
    while x.ndim > len(batch) + 1:
        x = x.amax(0)
    axes = [axis for axis in range(-x.ndim, -1) if batch[axis + 1] == 1 < x.shape[axis]]
    return x.amax(axes, keepdim=True) if axes else x
