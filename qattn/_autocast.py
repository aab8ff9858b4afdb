"""Functions, and products of matrices, that autocast leaves in the dtypes that they are given."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["product", "without_autocast"]

_DEVICES = "cpu", "cuda", "xpu", "mps"


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off in a block or a function, whose sums and products need the dtypes of their inputs."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right; unlike that of torch, its backward pass may be started within autocast."""
    return _Product.apply(left, right)


class _Product(torch.autograd.Function):
    @staticmethod
    @without_autocast()
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        by_left = product(grads[0], right.mT).sum_to_size(left.shape) if ctx.needs_input_grad[0] else None
        by_right = product(left.mT, grads[0]).sum_to_size(right.shape) if ctx.needs_input_grad[1] else None
        return by_left, by_right
