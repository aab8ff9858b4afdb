"""Operators for SciPy: a `LinearOperator` of a diffusion, and extreme eigenvalues of symmetric operators."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import identity
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, aslinearoperator, eigsh
from torch import Tensor

from qattn._types import dtype_name

__all__ = ["DiffusionOperator", "extreme_eigenvalues"]

_MAX_RESTARTS = 30
_MAX_DENSE = 64  # rows up to which LAPACK computes all eigenvalues


class DiffusionOperator(LinearOperator):  # type: ignore[misc]
    """SciPy operator of Q, or of √w Q /√w with a weight w for which Q is self-adjoint; applies to many columns at once.

    Args:
        apply: Function that maps v (N, C) to Qv.
        apply_transpose: Function that maps v (N, C) to Qᵀv.
        like: Vector (N,) with the dtype and device of the operator.
        weight: Weight w (N,) to symmetrize with, or None for Q itself; rows of weight 0 become 0.
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        apply_transpose: Callable[[Tensor], Tensor],
        like: Tensor,
        weight: Tensor | None,
    ) -> None:
        super().__init__(np.dtype(dtype_name(like.dtype)), (len(like), len(like)))
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

    _transpose = _adjoint  # entries are real


def extreme_eigenvalues(operator: LinearOperator, tol: float, scale: float, seed: int = 0) -> tuple[float, float]:
    """Estimate the smallest and the largest eigenvalue of a symmetric operator by Lanczos iteration.

    Args:
        operator: Symmetric operator of shape (N, N).
        tol: Tolerance; errors are about a tenth of it, relative to the larger of `scale` and the largest eigenvalue.
        scale: Smallest number that errors are relative to.
        seed: Seed of the starting vector; the same seed gives the same numbers.

    Returns:
        The smallest and the largest eigenvalue, NaN where the iteration did not converge.
    """
    N = operator.shape[0]
    if N <= _MAX_DENSE:
        dense = torch.as_tensor(operator @ np.eye(N, dtype=operator.dtype)).double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        return float(values[0]), float(values[-1])

    start = np.random.default_rng(seed).uniform(-1, 1, N).astype(operator.dtype)
    options = {"which": "LA", "tol": 0.1 * tol, "maxiter": _MAX_RESTARTS, "v0": start, "return_eigenvectors": False}

    def largest_of(symmetric: LinearOperator) -> float:
        try:
            return float(eigsh(symmetric, 1, **options)[0])
        except ArpackNoConvergence:
            return math.nan

    largest = largest_of(operator)
    # ARPACK's tolerance is relative, and useless for an eigenvalue near 0; a shift makes it absolute.
    shift = max(scale, largest)
    return shift - largest_of(shift * aslinearoperator(identity(N, dtype=operator.dtype)) - operator), largest
