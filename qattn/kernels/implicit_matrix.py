"""A symmetric matrix K ≥ 0 that is given by its products with vectors."""

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._autocast import without_autocast
from qattn.attended import Attended
from qattn.attention.batched import fold, unfold

__all__ = ["LinearOperatorLike", "Products", "checked_products", "is_operator"]


class LinearOperatorLike(Protocol):
    """A `scipy.sparse.linalg.LinearOperator`."""

    shape: tuple[int, ...]
    dtype: Any

    def matmat(self, x: np.ndarray, /) -> np.ndarray:
        """Multiply by a matrix (N, C)."""


class Products:
    """A matrix K, given by the map x ↦ K x.

    Args:
        product: Function from x (N, C) to K x.
        tensor: An empty tensor with the dtype and device of the vectors.
        num_rows: Number N of rows and columns.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], tensor: Tensor, num_rows: int) -> None:
        self._product, self.tensor, self._num_rows = product, tensor, num_rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._num_rows, self._num_rows))

    def replace(self, tensor: Tensor) -> "Products":
        """Return the same matrix for vectors of another dtype, or on another device."""
        return Products(self._product, tensor, self._num_rows)

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        """Compute out (*batch, N, C) and lse (*batch, N) for bias (*batch, N) and value (*batch, N, C)."""
        largest = bias.detach().amax(-1, keepdim=True)
        largest = torch.where(largest == -torch.inf, 0, largest)
        weights = torch.exp(bias - largest)[..., None]  # (*batch, N, 1)
        columns = weights
        if value is not None:
            columns = torch.cat([weights, weights * fold(value, bias.shape[:-1])], dim=-1)  # (*batch, N, 1 + C)
        *batch, _, C = columns.shape
        flat = columns.movedim(-2, 0).reshape(self._num_rows, -1).to(self.tensor.dtype)
        sums = _Symmetric.apply(flat, self._product).reshape(self._num_rows, *batch, C).movedim(0, -2)
        total = sums[..., 0]
        lse = largest + torch.log(total)
        if value is None:
            return Attended(None, lse)
        is_empty = total == 0
        out = torch.where(is_empty, 0, 1 / torch.where(is_empty, 1, total))[..., None] * sums[..., 1:]
        return Attended(unfold(out, value, bias.shape[:-1]).to(value.dtype), lse)


class _Symmetric(torch.autograd.Function):
    """K x, with the vector-Jacobian product g ↦ K g, however the product is implemented."""

    @staticmethod
    @without_autocast()
    def forward(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        return product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.product = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Symmetric.apply(grads[0], ctx.product), None


def is_operator(similarity: object) -> TypeGuard[LinearOperatorLike | Callable[[Tensor], Tensor]]:
    """Return whether a similarity is a function, or a SciPy `LinearOperator`."""
    return callable(similarity) or hasattr(similarity, "matmat")


def checked_products(
    similarity: LinearOperatorLike | Callable[[Tensor], Tensor], num_rows: int | None
) -> tuple[Callable[[Tensor], Tensor], Tensor, int]:
    """Check an operator on random signals, and return the arguments of `Products`."""
    operator: Any = similarity
    if hasattr(operator, "matmat"):
        if len(operator.shape) != 2 or operator.shape[0] != operator.shape[1]:
            raise ValueError(f"`similarity` should be a square operator; got shape {tuple(operator.shape)}.")
        num_rows = operator.shape[0]

        def product(x: Tensor) -> Tensor:
            return torch.as_tensor(np.asarray(operator @ x.numpy(force=True)), dtype=x.dtype, device=x.device)

        like = torch.empty(0, dtype=torch.float32 if operator.dtype == np.float32 else torch.float64)
    else:
        if num_rows is None:
            raise ValueError("`num_rows` should be given if `similarity` is a function.")
        product, like = operator, torch.empty(0)
    num_rows = _checks.integer("num_rows", num_rows, 1)
    signals = torch.rand(num_rows, 8, generator=torch.Generator().manual_seed(0)).to(like.dtype)
    signals[:, :4] -= 0.5
    with torch.no_grad():
        products = product(signals)
    if not isinstance(products, Tensor) or products.shape != signals.shape:
        got = _checks.shape_of(products) if isinstance(products, Tensor) else type(products).__name__
        raise ValueError(
            f"The product of `similarity` with a tensor {_checks.shape_of(signals)} should have its shape; got {got}."
        )
    _checks.finite("similarity", products, "These are products with random signals.")
    if (products[:, 4:] < -1e-5 * products.abs().amax()).any():
        raise ValueError("`similarity` should not be negative; its products with positive signals are, in places.")
    gram = signals[:, :4].double().T @ products[:, :4].double()
    if ((gram - gram.T).abs() > 1e-4 * (signals[:, :4].norm() * products[:, :4].norm())).any():
        raise ValueError("`similarity` should be symmetric; ⟨u, Kv⟩ and ⟨Ku, v⟩ differ for random signals u and v.")
    return product, like, num_rows
