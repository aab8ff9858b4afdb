"""Linear algebra of tall blocks of columns (N, n), whose rows are local or sharded over ranks."""

import torch
from torch import Tensor

from qattn.ranks import Ranks

__all__ = ["inner", "norms", "orthonormal_basis", "rounding"]

_CHUNK = 2**16  # rows that are converted to float64 at a time
_ROUNDING = 30.0  # machine epsilons below which an iteration makes no progress


def inner(a: Tensor, b: Tensor, ranks: Ranks) -> Tensor:
    """Return aᵀb in float64 for a (N, n) and b (N,) or (*batch, N, m), by chunks of rows to save memory."""
    axis = min(b.ndim, 2)
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK, dim=-axis), strict=True)
    return ranks.sum(torch.stack([x.double().T @ y.double() for x, y in chunks]).sum(0))


def norms(block: Tensor, ranks: Ranks) -> Tensor:
    """Return the norm of each column of a block (N, n), shape (n,)."""
    return ranks.total(block.mT.square()).sqrt()


def orthonormal_basis(block: Tensor, ranks: Ranks) -> Tensor:
    """Return an orthonormal basis (N, n) of the span of a block (N, n), by a QR per rank and one of their R factors."""
    local = torch.linalg.qr(block)
    if ranks.is_alone:
        return local.Q
    factors = ranks.joined(local.R)
    rotations = ranks.first(torch.linalg.qr(torch.cat(factors)).Q).split([len(factor) for factor in factors])
    return local.Q @ rotations[ranks.rank]


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error that rounding leaves at best."""
    return _ROUNDING * torch.finfo(dtype).eps
