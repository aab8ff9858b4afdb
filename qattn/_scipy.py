"""Operators as SciPy knows them: a `LinearOperator`, and its extreme eigenvalues."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import identity
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, aslinearoperator, eigsh
from torch import Tensor

__all__ = ["DiffusionOperator", "extreme_eigenvalues"]

_RESTARTS = 30
_FEW = 64  # rows, of which all eigenvalues are computed


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
        x = torch.from_numpy(np.require(columns, self.dtype, ["C", "W"])).to(self._like.device)
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
        if self._root is not None:
            return self
        return DiffusionOperator(self._apply_transpose, self._apply, self._like, None)

    _transpose = _adjoint  # of real numbers


def extreme_eigenvalues(operator: LinearOperator, tol: float, scale: float, seed: int = 0) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric operator, by Lanczos iteration; NaN if not found.

    The error is about a tenth of `tol`, relative to `scale` or the largest eigenvalue, whichever is more. The seed is
    that of the vector to start from, so that the same call gives the same numbers.
    """
    N = operator.shape[0]
    if N <= _FEW:
        dense = torch.as_tensor(operator @ np.eye(N, dtype=operator.dtype)).double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        return float(values[0]), float(values[-1])

    start = np.random.default_rng(seed).uniform(-1, 1, N).astype(operator.dtype)
    options = {"which": "LA", "tol": 0.1 * tol, "maxiter": _RESTARTS, "v0": start, "return_eigenvectors": False}

    def largest_of(some: LinearOperator) -> float:
        try:
            return float(eigsh(some, 1, **options)[0])
        except ArpackNoConvergence:
            return math.nan

    largest = largest_of(operator)
    # ARPACK's tolerance is relative, and useless for an eigenvalue near 0: from a shift it becomes absolute.
    shift = max(scale, largest)
    return shift - largest_of(shift * aslinearoperator(identity(N, dtype=operator.dtype)) - operator), largest
