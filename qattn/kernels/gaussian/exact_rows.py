"""A few rows of a Gaussian kernel from all pairs, local or sharded, to which other methods are compared."""

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.attention.score import Score, gaussian
from qattn.ranks import Ranks

__all__ = ["attend", "differentiate"]

_TOL = 1e-3  # of lse


def attend(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    sigma: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    backend: str = "auto",
    score: Score = gaussian,
) -> Attended:
    """Attend from a few queries (n, D) per rank to the keys (M, D) of all ranks, without gradient.

    Ranks exchange queries, not keys: each rank attends to its own keys from the queries of all ranks.
    """
    queries = ranks.joined(query)
    with torch.no_grad():
        out, own = attend_batched(
            Dispatch(backend), torch.cat(queries), key, value, bias, sigma=sigma, score=score, tol=_TOL
        )
        lse = ranks.log_sum(own)
        if out is not None:
            share = torch.where(own == -torch.inf, 0, torch.exp(own - lse))[:, None]
            out = ranks.sum((share * out).to(lse.dtype)).to(out.dtype)
    sizes = [len(rows) for rows in queries]
    return Attended(None if out is None else out.split(sizes)[ranks.rank], lse.split(sizes)[ranks.rank])


def differentiate(
    ranks: Ranks, query: Tensor, key: Tensor, sigma: Tensor, row: Tensor, column: Tensor, bias: Tensor, shift: Tensor
) -> Tensor:
    """Compute Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) for a few queries (n, D), in units of σ, (n, 2 + D).

    Rows R (n, C) and columns S (M, C) of s̄ are as in `attention/gradient.py`.
    """
    queries = ranks.joined(torch.cat([query, row, shift[:, None]], dim=-1))
    all_queries, rows, shifts = torch.cat(queries).split([query.shape[-1], row.shape[-1], 1], dim=-1)
    inputs = Inputs(all_queries[None], key[None], None, bias[None], sigma[None], tol=_TOL)
    sums = derivatives(Dispatch(), inputs, rows[None], column[None], shifts[None, :, 0])
    columns = [sums.total[0, :, None], sums.first[0] / sigma, sums.second[0, :, None] / sigma**2]
    return ranks.sum(torch.cat(columns, dim=-1)).split([len(rows) for rows in queries])[ranks.rank]
