"""Linear algebra of tall blocks of columns (N, n), whose rows are local or sharded over ranks."""

import torch
from torch import Tensor

from qattn.ranks import Ranks

__all__ = ["differences", "inner", "norms", "orthonormalize_", "rotate_", "rounding"]

_CHUNK = 2**12  # rows that are taken at a time, so that they are in the cache in float64 too
# Part of a column of length 1 that is independent of the others, from which Cholesky is exact enough.
_INDEPENDENT = 1e-3
_ROUNDING = 30.0  # machine epsilons below which an iteration makes no progress


def inner(a: Tensor, b: Tensor, ranks: Ranks) -> Tensor:
    """Return aᵀb in float64 for a (N, n) and b (N,) or (*batch, N, m), by chunks of rows to save memory."""
    axis = min(b.ndim, 2)
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK, dim=-axis), strict=True)
    return ranks.sum(torch.stack([x.double().T @ y.double() for x, y in chunks]).sum(0))


def norms(block: Tensor, ranks: Ranks) -> Tensor:
    """Return the norm of each column of a block (N, n), shape (n,)."""
    squares = torch.stack([rows.square().sum(0) for rows in block.split(_CHUNK)]).sum(0)
    return ranks.sum(squares).sqrt()


def differences(product: Tensor, values: Tensor, block: Tensor, ranks: Ranks) -> Tensor:
    """Return the norm of each column of product − values · block, shape (n,), by chunks of rows to save memory."""
    chunks = zip(product.split(_CHUNK), block.split(_CHUNK), strict=True)
    return ranks.sum(torch.stack([(x - values * y).square().sum(0) for x, y in chunks]).sum(0)).sqrt()


def orthonormalize_(block: Tensor, ranks: Ranks) -> Tensor:
    """Replace a block (N, n) by an orthonormal basis of its span, in place, and return it.

    By two Cholesky factorizations of the Gram matrix in float64, each with a product that takes no memory; by a QR per
    rank and one of their R factors if the columns are nearly dependent.
    """
    for _ in range(2):
        gram = inner(block, block, ranks)
        sizes = gram.diagonal().sqrt()
        gram = gram / (sizes[:, None] * sizes)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed or not bool(factor.diagonal().amin() > _INDEPENDENT):
            return _basis_by_qr(block, ranks)
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(gram)).to(gram), upper=False).mT
        rotate_(block, inverse / sizes[:, None])
    return block


def _basis_by_qr(block: Tensor, ranks: Ranks) -> Tensor:
    local = torch.linalg.qr(block)
    if ranks.is_alone:
        return local.Q
    factors = ranks.joined(local.R)
    rotations = ranks.first(torch.linalg.qr(torch.cat(factors)).Q).split([len(factor) for factor in factors])
    return local.Q @ rotations[ranks.rank]


def rotate_(block: Tensor, matrix: Tensor) -> Tensor:
    """Multiply a block (N, n) by a matrix (n, n) from the right, in place, by chunks of rows; return it."""
    matrix = matrix.to(block)
    for rows in block.split(_CHUNK):
        rows.copy_(rows @ matrix)
    return block


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error that rounding leaves at best."""
    return _ROUNDING * torch.finfo(dtype).eps
