"""Wrong input, worded once: what was expected, what came, and the remedy."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["attention_arguments"]


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _floating_tensor(name: str, tensor: Any, least_axes: int, axes: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` should be a torch.Tensor; got {type(tensor).__name__}. Convert it with `torch.as_tensor`."
        )
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`{name}` should be of floating point; got {dtype}. Convert it with `{name}.float()`.")
    if tensor.ndim < least_axes:
        raise ValueError(
            f"`{name}` should have shape {axes}; got {_shape(tensor)}. Add the missing axis, as in `{name}[None]`."
        )


def _finite(name: str, tensor: Tensor, remedy: str) -> None:
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise ValueError(
            f"`{name}` should be finite; {count} of its {tensor.numel()} numbers are NaN or infinite. {remedy}"
        )


def attention_arguments(
    query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, tol: float
) -> torch.Size:
    """Checks the arguments of `attend` and returns their common batch shape."""
    _floating_tensor("query", query, 2, "(*batch, N, D)")
    _floating_tensor("key", key, 2, "(*batch, M, D)")
    D, M = query.shape[-1], key.shape[-2]
    if D == 0:
        raise ValueError(f"`query` should have at least one coordinate; got shape {_shape(query)}.")
    if key.shape[-1] != D:
        raise ValueError(
            f"`key` should have as many coordinates as `query` {_shape(query)}: shape (*batch, M, {D}); "
            f"got {_shape(key)}."
        )
    batches = {"query": query.shape[:-2], "key": key.shape[:-2]}
    if value is not None:
        _floating_tensor("value", value, 2, "(*batch, M, C)")
        if value.shape[-2] != M:
            raise ValueError(
                f"`value` should have a row for each key of `key` {_shape(key)}: shape (*batch, {M}, C); "
                f"got {_shape(value)}."
            )
        batches["value"] = value.shape[:-2]
    if bias is not None:
        _floating_tensor("bias", bias, 1, "(*batch, M)")
        if bias.shape[-1] != M:
            raise ValueError(
                f"`bias` should have a number for each key of `key` {_shape(key)}: shape (*batch, {M}); "
                f"got {_shape(bias)}."
            )
        batches["bias"] = bias.shape[:-1]
    try:
        batch = torch.broadcast_shapes(*batches.values())
    except RuntimeError:
        shapes = ", ".join(f"`{name}` {tuple(shape)}" for name, shape in batches.items())
        raise ValueError(
            f"The batch axes should broadcast to one shape; got {shapes}. Give them equal sizes, or 1."
        ) from None
    for name, tensor in (("key", key), ("value", value), ("bias", bias)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"`{name}` should be on the device of `query`, {query.device}; got {tensor.device}. "
                f"Move it with `{name}.to(query.device)`."
            )
    if key.dtype != query.dtype:
        got, expected = (str(t.dtype).removeprefix("torch.") for t in (key, query))
        raise ValueError(
            f"`key` should have the dtype of `query`, {expected}; got {got}. Convert it with `key.to(query.dtype)`."
        )
    if not tol > 0:
        raise ValueError(f"`tol` should be positive, the error of lse that is acceptable; got {tol}.")
    _finite("query", query, "Drop those rows first.")
    _finite("key", key, "Drop those rows, or leave them out with a bias of −inf after setting their coordinates to 0.")
    if bias is not None and not (bias < torch.inf).all():  # false for NaN too
        raise ValueError("`bias` should be finite, or −inf where a key is absent; some of its numbers are NaN or +inf.")
    return batch
