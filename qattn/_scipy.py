"""A diffusion operator as a `scipy.sparse.linalg.LinearOperator`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

__all__ = ["DiffusionOperator"]


class DiffusionOperator(LinearOperator):  # type: ignore[misc]
    """Q, or √w Q /√w if a weight w is given, for which Q is self-adjoint; many columns at a time.

    Args:
        apply: v (N, C) to Qv.
        apply_transpose: v (N, C) to Qᵀv.
        like: A vector (N,) of the dtype and on the device of the operator.
        weight: The weight w (N,) to symmetrise with; rows of weight 0 become 0.
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        apply_transpose: Callable[[Tensor], Tensor],
        like: Tensor,
        weight: Tensor | None,
    ) -> None:
        super().__init__(np.dtype(str(like.dtype).removeprefix("torch.")), (len(like), len(like)))
        self._apply, self._apply_transpose, self._like = apply, apply_transpose, like
        self._root = None if weight is None else weight.sqrt()[:, None]  # (N, 1)

    def _run(self, apply: Callable[[Tensor], Tensor], columns: Any) -> Any:
        x = torch.as_tensor(np.ascontiguousarray(columns), dtype=self._like.dtype, device=self._like.device)
        with torch.no_grad():
            if self._root is not None:
                x = self._root * apply(torch.where(self._root > 0, x / self._root, 0))
            else:
                x = apply(x)
        return x.numpy(force=True)

    def _matmat(self, columns: Any) -> Any:
        return self._run(self._apply, columns)

    def _rmatmat(self, columns: Any) -> Any:
        return self._run(self._apply_transpose if self._root is None else self._apply, columns)

    def _adjoint(self) -> LinearOperator:
        return super()._adjoint() if self._root is None else self
