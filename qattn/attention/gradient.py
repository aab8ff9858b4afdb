r"""Gradients of Gaussian attention, written with attention.

With p_ij = exp(s_ij − lse_i), cotangents G of out and g of lse, and h_i = g_i − G_i · out_i, the score has the
cotangent

    s̄_ij = p_ij (G_i · v_j + h_i)        and        v̄_j = Σ_i p_ij G_i,   b̄_j = Σ_i s̄_ij,
    q̄_i = Σ_j s̄_ij (k_j − q_i),         k̄_j = Σ_i s̄_ij (q_i − k_j).

The sums over j are one attend with the values (v ⊗ k, k). The sums over i are one attend with queries and keys
exchanged and the bias −lse, whose weights are p_ij e^{−b_j}. So an engine needs no backward kernel of its own, memory
stays O(N), and the result can be differentiated again.
"""

from typing import Any

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Engine
from qattn.attention.dispatch import select
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian

__all__ = ["attend_differentiably"]


def attend_differentiably(inputs: Inputs, engine: Engine) -> Attended:
    """Attention by `engine`, with gradients of every order where any are asked for."""
    with torch.autocast(inputs.device.type, enabled=False):  # scores need the precision that they are given
        if not inputs.is_gaussian or not inputs.needs_gradients:
            return engine.attend(inputs)
        return Attended(*_Attend.apply(inputs.query, inputs.key, inputs.value, inputs.bias, inputs.tol, engine))


def _again(engine: Engine, tol: float, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Attended:
    """An attend of the backward pass: by the same engine if it takes these values too, else by what "auto" takes."""
    inputs = Inputs(query, key, value, bias, gaussian, tol, query.shape[:1])
    if engine.not_supported_reasons(inputs):
        engine = select(inputs, "auto")
    return attend_differentiably(inputs, engine)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, tol: float, engine: Engine
    ) -> tuple[Tensor | None, Tensor]:
        return engine.attend(Inputs(query, key, value, bias, gaussian, tol, query.shape[:1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        *tensors, ctx.tol, ctx.engine = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        query, key, value, bias, out, lse = ctx.saved_tensors
        grad_out, grad_lse = grads
        has_values = grad_out is not None
        if not has_values:  # as if the values had no channels
            value, out, grad_out = (x.new_zeros(*x.shape[:2], 0, dtype=lse.dtype) for x in (key, query, query))
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        h = (grad_lse - (grad_out.to(lse.dtype) * out).sum(-1))[..., None]  # (B, N, 1)
        # Products of coordinates and values cancel less about the centre.
        q, k = ctx.engine.centred(query.to(lse.dtype), key.to(lse.dtype))
        C, D, dtype = value.shape[-1], query.shape[-1], value.dtype
        needs_query, needs_key, needs_value, needs_bias = ctx.needs_input_grad[:4]
        grad_query = grad_key = grad_value = grad_bias = None

        if needs_query:
            values = torch.cat([_outer(value, k), k.to(dtype)], dim=-1)  # (B, M, CD + D)
            means = _again(ctx.engine, ctx.tol, query, key, values, bias).out
            assert means is not None
            weighted, plain = means.split([C * D, D], dim=-1)
            grad_query = _contract(grad_out, weighted, D) + h * plain - grad_lse[..., None] * q
            grad_query = grad_query.to(query.dtype)

        if needs_key or needs_value or needs_bias:
            columns = [grad_out, h, *([_outer(grad_out, q), h * q] if needs_key else [])]
            values = torch.cat([column.to(dtype) for column in columns], dim=-1)  # (B, N, C + 1 [+ CD + D])
            present = torch.where(lse == -torch.inf, -torch.inf, -lse)  # a row without keys has no weights
            means, scale = _again(ctx.engine.exchanged, ctx.tol, key, query, values, present)
            scale = torch.exp(scale if bias is None else scale + bias)[..., None]  # (B, M, 1)
            assert means is not None
            sums = (scale * means).split([C, 1, C * D, D] if needs_key else [C, 1], dim=-1)
            total = (value * sums[0]).sum(-1, keepdim=True) + sums[1]  # Σ_i s̄_ij
            grad_value = sums[0].to(dtype) if needs_value and has_values else None
            grad_bias = total[..., 0].to(bias.dtype) if needs_bias else None
            if needs_key:
                grad_key = (_contract(value, sums[2], D) + sums[3] - k * total).to(key.dtype)
        return grad_query, grad_key, grad_value, grad_bias, None, None


def _outer(value: Tensor, points: Tensor) -> Tensor:
    """(B, N, C) and (B, N, D) to (B, N, CD)."""
    return (value[..., :, None] * points[..., None, :]).flatten(-2)


def _contract(value: Tensor, outer: Tensor, dims: int) -> Tensor:
    """Σ_c value_c outer_cd: (B, N, C) and (B, N, CD) to (B, N, D)."""
    return (
        (value[..., None] * outer.unflatten(-1, (-1, dims))).sum(-2)
        if value.shape[-1]
        else outer.new_zeros(*outer.shape[:-1], dims)
    )
