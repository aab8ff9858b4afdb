"""Attention over batch axes that broadcast: flattened to one, or folded into channels if only `value` has them."""

import math

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.attended import Attended
from qattn.attention.dispatch import Dispatch
from qattn.attention.engine import Engine
from qattn.attention.gradient import differentiable
from qattn.attention.inputs import Inputs
from qattn.attention.score import Score, gaussian

__all__ = ["attend_batched", "fold", "unfold"]

_FAR = 200.0  # size of scores from which rounding in float32 may matter


def attend_batched(
    engine: Engine,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    *,
    sigma: Tensor | None = None,
    score: Score = gaussian,
    tol: float,
    all_rows: bool = True,
) -> Attended:
    """Attend with an engine, over leading batch axes that broadcast. Arguments are not checked.

    Args:
        engine: Engine, which may have been prepared for the batch of `query` and `key`.
        query: Points (*batch, N, D).
        key: Points (*batch, M, D); the same object for clouds that attend to themselves.
        value: Values (*batch, M, C), finite where a key is present.
        bias: Biases (*batch, M).
        sigma: Bandwidths of a shape that broadcasts to the batch.
        score: The score of one query and one key.
        tol: Largest acceptable error of lse.
        all_rows: See `Inputs`.

    Returns:
        out (*batch, N, C) with all batch axes, and lse (*batch, N) with those of query, key, bias and sigma.
    """
    shapes = [query.shape[:-2], key.shape[:-2]] + [x.shape[:-1] for x in (bias,) if x is not None]
    batch = broadcast_shapes(*shapes) if sigma is None else broadcast_shapes(*shapes, sigma.shape)
    folded = None if value is None or value.shape[-1] == 0 else fold(value, batch)
    keys = _flat(key, 2, batch)
    inputs = Inputs(
        keys if query is key else _flat(query, 2, batch),
        keys,
        None if folded is None else _flat(folded, 2, batch),
        None if bias is None else _flat(bias, 1, batch),
        None if sigma is None else _flat(sigma, 0, batch),
        score,
        tol,
        all_rows,
        batch=batch,
    )
    if reasons := engine.not_supported_reasons(inputs):
        raise NotImplementedError(
            f"The method of the kernel does not take these inputs:\n{inputs.describe()}\n  {'; '.join(reasons)}"
        )
    N, M = query.shape[-2], key.shape[-2]
    if 0 in (N, M, batch.numel()) and engine.ranks.is_alone:
        out, lse = None, query.new_full((batch.numel(), N), -torch.inf, dtype=inputs.dtype)
    else:
        out, lse = differentiable(engine, inputs)
        if inputs.dtype == torch.float32 and engine.ranks.is_alone and (all_rows or query is not key):
            out, lse = _with_far_rows(inputs, Attended(out, lse))
    lse = lse.reshape(*batch, N)
    if value is None:
        return Attended(None, lse)
    if out is None or folded is None:
        full_batch = broadcast_shapes(value.shape[:-2], batch)
        return Attended(value.new_zeros(*full_batch, N, value.shape[-1]), lse)
    return Attended(unfold(out.reshape(*batch, N, folded.shape[-1]), value, batch), lse)


def _flat(x: Tensor, axes: int, batch: torch.Size) -> Tensor:
    shape = x.shape[x.ndim - axes :]
    return x.expand((*batch, *shape)).reshape(batch.numel(), *shape)


def _with_far_rows(inputs: Inputs, attended: Attended) -> Attended:
    """Recompute in float64 the rows whose scores are so large that float32 cannot distinguish keys.

    If a cloud attends to itself, only points that are left out as keys have such rows.
    """
    (out, lse), bias = attended, inputs.bias
    is_self = inputs.query is inputs.key
    if is_self and bias is None:
        return attended
    largest_bias = 0.0 if bias is None else bias.amax(-1, keepdim=True)
    reach = max(_FAR, inputs.tol / (8 * torch.finfo(torch.float32).eps))
    is_far = ((lse > -torch.inf) & (lse < largest_bias - reach)).any(0)
    if not is_far.any():
        return attended
    rows = is_far.nonzero()[:, 0]
    query, key, value, bias, sigma = (None if x is None else x.double() for x in inputs.tensors)
    assert query is not None
    assert key is not None
    exact = differentiable(
        Dispatch("auto" if inputs.is_gaussian else "reference"),
        Inputs(query[:, rows], key, value, bias, sigma, inputs.score, inputs.tol),
    )
    lse = lse.index_copy(-1, rows, exact.lse.to(lse.dtype))
    if out is not None and exact.out is not None:
        out = out.index_copy(-2, rows, exact.out.to(out.dtype))
    return Attended(out, lse)


def _extra_axes(value: Tensor, batch: torch.Size) -> tuple[torch.Size, list[int], list[int]]:
    """Return the common batch of kernel and value, the axes of it that the kernel has, and those that it lacks."""
    full = broadcast_shapes(value.shape[:-2], batch)
    aligned = (1,) * (len(full) - len(batch)) + tuple(batch)
    extra = [axis for axis in range(len(full)) if aligned[axis] == 1 and full[axis] != 1]
    return full, [axis for axis in range(len(full)) if axis not in extra], extra


def fold(value: Tensor, batch: torch.Size) -> Tensor:
    """Move the axes of values (*full_batch, M, C) that the batch of the kernel lacks into channels: (*batch, M, …)."""
    full, shared, extra = _extra_axes(value, batch)
    axes = [*shared, len(full), *extra, len(full) + 1]
    M, channels = value.shape[-2], math.prod(full[axis] for axis in extra) * value.shape[-1]
    return value.expand(*full, -1, -1).permute(axes).reshape(*batch, M, channels)


def unfold(out: Tensor, value: Tensor, batch: torch.Size) -> Tensor:
    """Undo `fold`: from (*batch, N, …) to (*full_batch, N, C)."""
    full, shared, extra = _extra_axes(value, batch)
    N, C = out.shape[-2], value.shape[-1]
    out = out.reshape(*(full[a] for a in shared), N, *(full[a] for a in extra), C)
    axes = [*shared, len(full), *extra, len(full) + 1]
    return out.permute(*(axes.index(a) for a in range(len(axes))))
