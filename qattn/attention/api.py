"""The one primitive everything is written on."""

from collections.abc import Callable

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn.attended import Attended
from qattn.attention.backend import Engine
from qattn.attention.dispatch import select
from qattn.attention.gradient import attend_differentiably
from qattn.attention.inputs import Inputs
from qattn.attention.score import Score, gaussian

__all__ = ["attend", "attend_by"]

_FAR = 200.0  # a score from which on rounding in float32 may matter


@eager
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    score: Score = gaussian,
    tol: float = 1e-3,
    backend: str = "auto",
) -> Attended:
    r"""Gaussian attention: softmax averages of values with the scores :math:`s_{ij} = -\tfrac12\|q_i - k_j\|^2 + b_j`.

    Equivalent to the following, in O(N + M) memory::

        scores = -0.5 * torch.cdist(query, key) ** 2 + bias[..., None, :]
        return Attended(scores.softmax(-1) @ value, scores.logsumexp(-1))

    Differentiable to any order in `query`, `key`, `value` and `bias`, through both results and on every backend: the
    backward pass is attention too. It takes the backend of the forward pass where that one takes its inputs, and
    otherwise the one "auto" takes.

    Args:
        query: Points of shape (*batch, N, D).
        key: Points of shape (*batch, M, D), in the dtype of `query`.
        value: Values of shape (*batch, M, C), in any floating dtype; None for the log-sum-exp alone.
        bias: Numbers of shape (*batch, M) added to the scores of each key; −inf leaves the key out.
        score: Another score, a function of two tuples of coordinates; `reference` and `flex` take one.
        tol: The largest error of lse that is acceptable. Backends that lift points into dot products refuse when their
            rounding exceeds it.
        backend: "auto", or a name of `qattn.backends()`, which is then used or refused, never replaced.

    Returns:
        `out` (*batch, N, C) in the dtype of `value`, or None; `lse` (*batch, N) in float32, or float64 if any input is.

    Example:
        >>> points = torch.randn(1000, 3)
        >>> out, lse = attend(points / 0.1, points / 0.1, points)
        >>> out.shape, lse.shape
        (torch.Size([1000, 3]), torch.Size([1000]))
    """
    return attend_by(lambda inputs: select(inputs, backend), query, key, value, bias=bias, score=score, tol=tol)


@eager
def attend_by(
    engine: Callable[[Inputs], Engine],
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    bias: Tensor | None,
    score: Score = gaussian,
    tol: float,
    sigma: Tensor | None = None,
) -> Attended:
    """As `attend`, by the engine that is chosen for the inputs once they have been checked and flattened.

    With bandwidths `sigma`, of a shape that broadcasts to the batch, scores are those of differences by them.
    """
    batch = _checks.attention_arguments(query, key, value, bias, tol)
    if value is not None and bias is not None:  # keys that are left out may hold anything, NaN too
        value = torch.where((bias == -torch.inf)[..., None], 0, value)
    N, M = query.shape[-2], key.shape[-2]

    def flat(tensor: Tensor | None, axes: int) -> Tensor | None:
        if tensor is None:
            return None
        shape = tensor.shape[-axes:]
        return tensor.expand(*batch, *shape).reshape(batch.numel(), *shape)

    values = value if value is not None and value.shape[-1] > 0 else None
    keys = flat(key, 2)
    queries = keys if query is key else flat(query, 2)
    bandwidths = None if sigma is None else sigma.expand(batch).reshape(-1)
    inputs = Inputs(queries, keys, flat(values, 2), flat(bias, 1), score, tol, batch, bandwidths)  # type: ignore[arg-type]
    chosen = engine(inputs)
    if (N == 0 or M == 0 or batch.numel() == 0) and chosen.ranks.is_alone:
        out, lse = None, query.new_full((*batch, N), -torch.inf, dtype=inputs.dtype)
    else:
        out, lse = attend_differentiably(inputs, chosen)
        lse = lse.reshape(*batch, N)
    if value is not None:
        out = value.new_zeros(*batch, N, value.shape[-1]) if out is None else out.reshape(*batch, N, value.shape[-1])
    if bias is not None and chosen.ranks.is_alone:  # kernels do not agree on what a row without any key gives
        absent = (bias == -torch.inf).all(-1, keepdim=True).expand(*batch, N)
        lse = torch.where(absent, -torch.inf, lse)
        out = None if out is None else torch.where(absent[..., None], 0, out)
    if inputs.dtype == torch.float64 or not chosen.ranks.is_alone:
        return Attended(out, lse)
    rows = _far_rows(query is key, bias, lse, tol)
    if len(rows) == 0:
        return Attended(out, lse)
    # Their scores are so large that float32 does not tell one key from another.
    tensors = (None if x is None else x.double() for x in (query[..., rows, :], key, value, bias, sigma))
    exact_query, exact_key, exact_value, exact_bias, exact_sigma = tensors
    assert exact_query is not None
    assert exact_key is not None
    exact = attend_by(
        lambda some: select(some, "auto" if score is gaussian else "reference"),
        exact_query, exact_key, exact_value, bias=exact_bias, score=score, tol=tol, sigma=exact_sigma,
    )  # fmt: skip
    lse = lse.index_copy(-1, rows, exact.lse.to(lse.dtype).expand(*batch, -1))
    if out is not None and exact.out is not None:
        out = out.index_copy(-2, rows, exact.out.to(out.dtype).expand(*batch, -1, -1))
    return Attended(out, lse)


def _far_rows(is_self: bool, bias: Tensor | None, lse: Tensor, tol: float) -> Tensor:
    """The numbers of rows whose scores are too large for float32 to be right to `tol`.

    Of a cloud that attends to itself, these can only be rows of points that are left out as keys.
    """
    has_absent = bias is not None and bool((bias == -torch.inf).any())
    if (is_self and not has_absent) or not (lse > -torch.inf).any():
        return torch.zeros(0, dtype=torch.long, device=lse.device)
    top = 0.0 if bias is None else bias.amax(-1, keepdim=True)
    far = (lse > -torch.inf) & (lse < top - max(_FAR, tol / (8 * torch.finfo(torch.float32).eps)))
    return far.reshape(lse.shape[:-1].numel(), lse.shape[-1]).any(0).nonzero()[:, 0]
