"""The public function of attention, the primitive on which everything else is built."""

from typing import Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._eager import eager
from qattn._types import dtype_name
from qattn.attended import Attended
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.attention.score import Score, gaussian

__all__ = ["BackendName", "attend"]

BackendName = Literal["auto", "native", "triton", "flash_attn", "sdpa", "xformers", "flex", "reference"]


@eager
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    score: Score = gaussian,
    tol: float = 1e-3,
    backend: BackendName = "auto",
) -> Attended:
    r"""Gaussian attention: softmax averages of values with the scores s_ij = −½‖q_i − k_j‖² + b_j.

    Equivalent to the following, in O(N + M) memory::

        scores = -0.5 * torch.cdist(query, key) ** 2 + bias[..., None, :]
        return Attended(scores.softmax(-1) @ value, scores.logsumexp(-1))

    Both results are differentiable to any order in `query`, `key`, `value` and `bias`, on every backend, because the
    backward pass is attention too. It uses the backend of the forward pass if that takes its inputs, else "auto".

    Args:
        query: Points of shape (*batch, N, D).
        key: Points of shape (*batch, M, D), in the dtype of `query`.
        value: Values of shape (*batch, M, C), in any floating dtype; None for the log-sum-exp alone.
        bias: Numbers of shape (*batch, M) added to the scores of each key; −inf leaves the key out.
        score: Another score, a function of two tuples of coordinates; taken by `reference` and `flex`.
        tol: Largest acceptable error of lse. Backends that lift points into dot products do not take inputs for which
            the rounding error exceeds it.
        backend: "auto", or the name of a backend (see `qattn.backends()`), which is never replaced by another one.

    Returns:
        `out` (*batch, N, C) in the dtype of `value`, or None; `lse` (*batch, N) in float32, or float64 if any input is.

    Raises:
        NotImplementedError: If the backend does not take the inputs, or none does, with the reasons of each backend.

    Examples:
        >>> points = torch.randn(1000, 3)
        >>> out, lse = attend(points / 0.1, points / 0.1, points)
        >>> out.shape, lse.shape
        (torch.Size([1000, 3]), torch.Size([1000]))
    """
    batch = _checked_batch(query, key, value, bias, tol)
    if value is not None and bias is not None:  # values of keys that are left out may be NaN
        value = torch.where((bias == -torch.inf)[..., None], 0, value)
    out, lse = attend_batched(Dispatch(backend), query, key, value, bias, score=score, tol=tol)
    return Attended(out, lse.expand(*batch, -1))


def _checked_batch(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, tol: float) -> torch.Size:
    """Check the arguments of `attend` and return their common batch shape."""
    _checks.floating_tensor("query", query, 2, "(*batch, N, D)")
    _checks.floating_tensor("key", key, 2, "(*batch, M, D)")
    D, M = query.shape[-1], key.shape[-2]
    if D == 0:
        raise ValueError(f"`query` should have at least one coordinate; got shape {_checks.shape_of(query)}.")
    if key.shape[-1] != D:
        raise ValueError(
            f"`key` should have as many coordinates as `query` {_checks.shape_of(query)}: shape (*batch, M, {D}); "
            f"got {_checks.shape_of(key)}."
        )
    batches = {"query": query.shape[:-2], "key": key.shape[:-2]}
    if value is not None:
        _checks.floating_tensor("value", value, 2, "(*batch, M, C)")
        if value.shape[-2] != M:
            raise ValueError(
                f"`value` should have a row for each key of `key` {_checks.shape_of(key)}: shape (*batch, {M}, C); "
                f"got {_checks.shape_of(value)}."
            )
        batches["value"] = value.shape[:-2]
    if bias is not None:
        _checks.floating_tensor("bias", bias, 1, "(*batch, M)")
        if bias.shape[-1] != M:
            raise ValueError(
                f"`bias` should have a number for each key of `key` {_checks.shape_of(key)}: shape (*batch, {M}); "
                f"got {_checks.shape_of(bias)}."
            )
        batches["bias"] = bias.shape[:-1]
    try:
        batch = broadcast_shapes(*batches.values())
    except RuntimeError:
        shapes = ", ".join(f"`{name}` {tuple(shape)}" for name, shape in batches.items())
        raise ValueError(
            f"The batch axes should broadcast to one shape; got {shapes}. Their sizes should be equal, or 1."
        ) from None
    for name, tensor in (("key", key), ("value", value), ("bias", bias)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"`{name}` should be on the device of `query`, {query.device}; got {tensor.device}. "
                f"Move it with `{name}.to(query.device)`."
            )
    if key.dtype != query.dtype:
        got, expected = (dtype_name(t.dtype) for t in (key, query))
        raise ValueError(
            f"`key` should have the dtype of `query`, {expected}; got {got}. Convert it with `key.to(query.dtype)`."
        )
    if not tol > 0:
        raise ValueError(f"`tol` should be positive, the largest acceptable error of lse; got {tol}.")
    _checks.finite("query", query, "Drop those rows first.")
    if key is not query:
        remedy = "Drop those rows, or leave them out with a bias of −inf after setting their coordinates to 0."
        _checks.finite("key", key, remedy)
    if bias is not None and not (bias < torch.inf).all():  # false for NaN too
        raise ValueError("`bias` should be finite, or −inf where a key is absent; some of its numbers are NaN or +inf.")
    return batch
