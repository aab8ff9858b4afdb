"""What `attend` and its engines take."""

from typing import Any

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn._checks.numbers import finite, floating_tensor, shape_of

__all__ = ["attention_arguments", "bias_of_kernel", "engine_takes"]


def attention_arguments(
    query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, tol: float
) -> torch.Size:
    """Checks the arguments of `attend` and returns their common batch shape."""
    given = [x for x in (query, key, value, bias) if isinstance(x, Tensor)]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in given):
        raise NotImplementedError(
            "qattn does not run inside torch.func (vmap, grad, jacrev, jvp). Give batches as leading axes, and "
            "differentiate with torch.autograd: `torch.autograd.grad` or `torch.autograd.functional.jacobian`."
        )
    floating_tensor("query", query, 2, "(*batch, N, D)")
    floating_tensor("key", key, 2, "(*batch, M, D)")
    D, M = query.shape[-1], key.shape[-2]
    if D == 0:
        raise ValueError(f"`query` should have at least one coordinate; got shape {shape_of(query)}.")
    if key.shape[-1] != D:
        raise ValueError(
            f"`key` should have as many coordinates as `query` {shape_of(query)}: shape (*batch, M, {D}); "
            f"got {shape_of(key)}."
        )
    batches = {"query": query.shape[:-2], "key": key.shape[:-2]}
    if value is not None:
        floating_tensor("value", value, 2, "(*batch, M, C)")
        if value.shape[-2] != M:
            raise ValueError(
                f"`value` should have a row for each key of `key` {shape_of(key)}: shape (*batch, {M}, C); "
                f"got {shape_of(value)}."
            )
        batches["value"] = value.shape[:-2]
    if bias is not None:
        floating_tensor("bias", bias, 1, "(*batch, M)")
        if bias.shape[-1] != M:
            raise ValueError(
                f"`bias` should have a number for each key of `key` {shape_of(key)}: shape (*batch, {M}); "
                f"got {shape_of(bias)}."
            )
        batches["bias"] = bias.shape[:-1]
    try:
        batch = broadcast_shapes(*batches.values())
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
    finite("query", query, "Drop those rows first.")
    if key is not query:
        remedy = "Drop those rows, or leave them out with a bias of −inf after setting their coordinates to 0."
        finite("key", key, remedy)
    if bias is not None and not (bias < torch.inf).all():  # false for NaN too
        raise ValueError("`bias` should be finite, or −inf where a key is absent; some of its numbers are NaN or +inf.")
    return batch


def bias_of_kernel(bias: Tensor, batch: torch.Size) -> None:
    """Checks a bias (*batch, M) for a kernel whose points have been prepared."""
    if broadcast_shapes(bias.shape[:-1], batch) != batch:
        raise ValueError(
            f"`bias` should have the batch axes {tuple(batch)} of the kernel; got shape {shape_of(bias)}. "
            'Give the points those axes too, or take `method="exact"`.'
        )


def engine_takes(engine: Any, inputs: Any) -> Any:
    """An engine that was prepared before its inputs were known, or why it cannot take them."""
    reasons = engine.not_supported_reasons(inputs)
    if reasons:
        raise NotImplementedError(
            f"The method of the kernel does not take these inputs:\n{inputs.describe()}\n  {'; '.join(reasons)}"
        )
    return engine
