"""Attention by an engine that has been prepared for the points of a kernel, and a few exact rows to check it by."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn.attended import Attended
from qattn.attention import gaussian
from qattn.attention.api import attend_by
from qattn.attention.backend import Engine
from qattn.attention.dispatch import select
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.attention.score import Score
from qattn.ranks import Ranks

__all__ = [
    "attend_by_heads",
    "attend_folded",
    "attend_prepared",
    "fold",
    "rows_attended",
    "rows_differentiated",
    "unfold",
]

_TOL = 1e-3  # of lse, in exact rows


def attend_prepared(
    engine: Engine,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor,
    tol: float,
    score: Score = gaussian,
    sigma: Tensor | None = None,
) -> Attended:
    """As `attend_folded`, by an engine for these queries and keys."""
    batch = broadcast_shapes(query.shape[:-2], key.shape[:-2])
    _checks.bias_of_kernel(bias, batch)
    if query is not key:
        query, key = (x.expand(*batch, -1, -1) for x in (query, key))
    return attend_folded(partial(_checks.engine_takes, engine), query, key, value, bias, tol, score, sigma)


def attend_folded(
    chosen: Callable[[Inputs], Engine],
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor,
    tol: float,
    score: Score = gaussian,
    sigma: Tensor | None = None,
) -> Attended:
    """As `attend_by`: a batch of the values that the kernel lacks goes by channels, so that lse does not have it."""
    batch = broadcast_shapes(query.shape[:-2], key.shape[:-2], bias.shape[:-1])
    folded = None if value is None else fold(value, batch)
    out, lse = attend_by(chosen, query, key, folded, bias=bias, score=score, tol=tol, sigma=sigma)
    return Attended(None if out is None or value is None else unfold(out, value, batch), lse)


def attend_by_heads(
    groups: list[tuple[Tensor | None, Engine | None]],
    batch: torch.Size,
    bias: Tensor,
    value: Tensor | None,
    attend_by_one: Callable[[Engine | None, Tensor | None, Tensor, Tensor | None], Attended],
) -> Attended:
    """Attention by several engines, each for some heads, the last axis of the batch; None for all of them."""
    if len(groups) == 1:
        return attend_by_one(groups[0][1], None, bias, value)
    bias = bias.expand(*batch, -1)  # (*batch, H, M)
    if value is not None:
        value = value.expand(*broadcast_shapes(value.shape[:-2], batch), -1, -1)
    parts = []
    for heads, engine in groups:
        assert heads is not None
        values = None if value is None else value.index_select(-3, heads)
        parts.append(attend_by_one(engine, heads, bias.index_select(-2, heads), values))
    back = torch.argsort(torch.cat([heads for heads, _ in groups if heads is not None]))
    lse = torch.cat([part.lse for part in parts], dim=-2).index_select(-2, back)
    if value is None:
        return Attended(None, lse)
    return Attended(torch.cat([part.out for part in parts], dim=-3).index_select(-3, back), lse)  # type: ignore[misc]


def rows_attended(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    sigma: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    backend: str = "auto",
) -> Attended:
    """Exact attention of a few queries (n, D) of each rank to the keys (M, D) of all, without gradient.

    The queries travel, and not the keys: every rank attends to its own with the queries of all.
    """
    queries = ranks.joined(query)
    chosen = partial(select, name=backend)
    with torch.no_grad():
        out, own = attend_by(chosen, torch.cat(queries), key, value, bias=bias, tol=_TOL, sigma=sigma)
        lse = ranks.log_sum(own)
        if out is not None:
            share = torch.where(own == -torch.inf, 0, torch.exp(own - lse))[:, None]
            out = ranks.sum((share * out).to(lse.dtype)).to(out.dtype)
    sizes = [len(rows) for rows in queries]
    return Attended(None if out is None else out.split(sizes)[ranks.rank], lse.split(sizes)[ranks.rank])


def rows_differentiated(
    ranks: Ranks, query: Tensor, key: Tensor, sigma: Tensor, row: Tensor, column: Tensor, bias: Tensor, shift: Tensor
) -> Tensor:
    """Exact sums Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) of a few queries (n, D), in units of σ, (n, 2 + D).

    For rows R (n, C) and columns S (M, C) of s̄; see `attention/gradient.py`.
    """
    queries = ranks.joined(torch.cat([query, row, shift[:, None]], dim=-1))
    everywhere, rows, shifts = torch.cat(queries).split([query.shape[-1], row.shape[-1], 1], dim=-1)
    inputs = Inputs(everywhere[None], key[None], None, bias[None], gaussian, _TOL, torch.Size((1,)), sigma[None])
    found = derivatives(select(inputs, "auto"), inputs, rows[None], column[None], shifts[None, :, 0])
    sums = [found.total[0, :, None], found.first[0] / sigma, found.second[0, :, None] / sigma**2]
    return ranks.sum(torch.cat(sums, dim=-1)).split([len(rows) for rows in queries])[ranks.rank]


def _extra_axes(value: Tensor, batch: torch.Size) -> tuple[torch.Size, list[int], list[int]]:
    """The batch of kernel and value together, its axes that the kernel has, and those that only the value has."""
    whole = broadcast_shapes(value.shape[:-2], batch)
    own = (1,) * (len(whole) - len(batch)) + tuple(batch)
    extra = [axis for axis in range(len(whole)) if own[axis] == 1 and whole[axis] != 1]
    return whole, [axis for axis in range(len(whole)) if axis not in extra], extra


def fold(value: Tensor, batch: torch.Size) -> Tensor:
    """Values (*whole, M, C) with the axes that the kernel lacks among the channels: (*batch, M, …)."""
    whole, kept, extra = _extra_axes(value, batch)
    axes = [*kept, len(whole), *extra, len(whole) + 1]
    M, channels = value.shape[-2], math.prod(whole[axis] for axis in extra) * value.shape[-1]
    return value.expand(*whole, -1, -1).permute(axes).reshape(*batch, M, channels)


def unfold(out: Tensor, value: Tensor, batch: torch.Size) -> Tensor:
    """Back from (*batch, N, …) to (*whole, N, C)."""
    whole, kept, extra = _extra_axes(value, batch)
    N, C = out.shape[-2], value.shape[-1]
    out = out.reshape(*(whole[a] for a in kept), N, *(whole[a] for a in extra), C)
    axes = [*kept, len(whole), *extra, len(whole) + 1]
    return out.permute(*(axes.index(a) for a in range(len(axes))))
