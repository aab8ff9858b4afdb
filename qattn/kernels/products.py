"""A symmetric matrix K ≥ 0, by what it makes of vectors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.kernels.prepared import fold, unfold

__all__ = ["Products"]


class Products:
    """K by its products.

    Args:
        product: x (N, C) to K x.
        tensor: An empty tensor of the dtype and on the device of its vectors.
        size: The number N of rows and columns.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], tensor: Tensor, size: int) -> None:
        self._product, self.tensor, self._size = product, tensor, size

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._size, self._size))

    def replace(self, tensor: Tensor) -> "Products":
        """The same matrix for vectors of another dtype, or on another device."""
        return Products(self._product, tensor, self._size)

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        """lse (*batch, N) and out (*batch, N, C) for bias (*batch, N) and value (*batch, N, C), by one product."""
        top = bias.detach().amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        weights = torch.exp(bias - top)[..., None]  # (*batch, N, 1)
        columns = weights
        if value is not None:
            columns = torch.cat([weights, weights * fold(value, bias.shape[:-1])], dim=-1)  # (*batch, N, 1 + C)
        *batch, _, C = columns.shape
        flat = columns.movedim(-2, 0).reshape(self._size, -1).to(self.tensor.dtype)
        sums = _Symmetric.apply(flat, self._product).reshape(self._size, *batch, C).movedim(0, -2)
        total = sums[..., 0]
        lse = top + torch.log(total)
        if value is None:
            return Attended(None, lse)
        is_empty = total == 0
        out = torch.where(is_empty, 0, 1 / torch.where(is_empty, 1, total))[..., None] * sums[..., 1:]
        return Attended(unfold(out, value, bias.shape[:-1]).to(value.dtype), lse)


class _Symmetric(torch.autograd.Function):
    """K x, whose gradient by x is K times that of the product: no matter how the product is made."""

    @staticmethod
    def forward(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        return product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.product = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _Symmetric.apply(grads[0], ctx.product), None
