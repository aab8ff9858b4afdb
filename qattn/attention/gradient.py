r"""Gradients of Gaussian attention, written with attention.

With p_ij = exp(s_ij − lse_i), cotangents G of out and g of lse, and h_i = g_i − G_i · out_i, the score has the
cotangent

    s̄_ij = p_ij (G_i · v_j + h_i)        and        v̄_j = Σ_i p_ij G_i,   b̄_j = Σ_i s̄_ij,
    q̄_i = Σ_j s̄_ij (k_j − q_i),         k̄_j = Σ_i s̄_ij (q_i − k_j).

The sums over j are one attend with the values (v ⊗ k, k). The sums over i are one attend with queries and keys
exchanged and the bias −lse, whose weights are p_ij e^{−b_j}. So an engine needs no backward kernel of its own, memory
stays O(N), and the result can be differentiated again.

By the logarithm of a bandwidth that points are divided by, s has the derivative ‖q − k‖². Engines that average values
times that in the same pass spare the backward pass those C D channels:

    ∂/∂ log σ = Σ_i (G_i · Σ_j p_ij ‖q_i − k_j‖² v_j + h_i Σ_j p_ij ‖q_i − k_j‖²).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Engine, Moments
from qattn.attention.dispatch import select
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian
from qattn.pullback import vector_jacobian

__all__ = ["attend_differentiably"]


def attend_differentiably(inputs: Inputs, engine: Engine) -> Attended:
    """Attention by `engine`, with gradients of every order where any are asked for."""
    with torch.autocast(inputs.device.type, enabled=False):  # scores need the precision that they are given
        if not inputs.is_gaussian or not inputs.needs_gradients:
            return engine.attend(inputs)
        if inputs.log_sigma is None:
            return Attended(*_Attend.apply(inputs.query, inputs.key, inputs.value, inputs.bias, inputs.tol, engine))
        if isinstance(engine, Moments) and engine.takes_moments(inputs):
            tensors = inputs.log_sigma, inputs.query, inputs.key, inputs.value, inputs.bias
            return Attended(*_AttendByBandwidth.apply(*tensors, inputs.tol, engine)[:2])
        return attend_differentiably(_by_points(inputs), engine)


def _by_points(inputs: Inputs) -> Inputs:
    """The same attention as a function of its queries and keys, which are functions of the bandwidths."""
    assert inputs.log_sigma is not None
    scale = torch.exp(inputs.log_sigma.detach() - inputs.log_sigma)[:, None, None].to(inputs.query.dtype)  # 1
    return replace(inputs, query=scale * inputs.query, key=scale * inputs.key, log_sigma=None)


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
            sums = _sums_over_queries(ctx.engine, ctx.tol, query, key, bias, lse, columns, dtype)
            total = (value * sums[0]).sum(-1, keepdim=True) + sums[1]  # Σ_i s̄_ij
            grad_value = sums[0].to(dtype) if needs_value and has_values else None
            grad_bias = total[..., 0].to(bias.dtype) if needs_bias else None
            if needs_key:
                grad_key = (_contract(value, sums[2], D) + sums[3] - k * total).to(key.dtype)
        return grad_query, grad_key, grad_value, grad_bias, None, None


def _sums_over_queries(
    engine: Engine,
    tol: float,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    columns: list[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Σ_i p_ij c_i (B, M, n) for each of the columns c (B, N, n), by one attend from the keys to the queries."""
    values = torch.cat([column.to(dtype) for column in columns], dim=-1)
    present = torch.where(lse == -torch.inf, -torch.inf, -lse)  # a row without keys has no weights
    means, scale = _again(engine.exchanged, tol, key, query, values, present)
    scale = torch.exp(scale if bias is None else scale + bias)[..., None]  # (B, M, 1)
    assert means is not None
    return list((scale * means).split([column.shape[-1] for column in columns], dim=-1))


class _AttendByBandwidth(torch.autograd.Function):
    """Attention as a function of log σ, values and biases; the third result, without gradients, is for the backward."""

    @staticmethod
    def forward(
        log_sigma: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        tol: float,
        engine: Engine,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        dtype = torch.promote_types(query.dtype, torch.float32) if value is None else value.dtype
        ones = key.new_ones(*key.shape[:2], 1, dtype=dtype)
        values = ones if value is None else torch.cat([value, ones], dim=-1)
        inputs = Inputs(query, key, values, bias, gaussian, tol, query.shape[:1])
        assert isinstance(engine, Moments)
        (out, lse), moments = engine.attend_with_moments(inputs)
        assert out is not None
        return None if value is None else out[..., :-1], lse, moments

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor, Tensor]) -> None:
        *tensors, ctx.tol, ctx.engine = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        log_sigma, query, key, value, bias, out, lse, moments = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, which the moments cannot be

            def attended(*tensors: Tensor) -> tuple[Tensor, ...]:
                inputs = Inputs(query, key, tensors[1], tensors[2], gaussian, ctx.tol, query.shape[:1], tensors[0])
                results = attend_differentiably(_by_points(inputs), ctx.engine)
                return tuple(x for x, grad in zip(results, grads, strict=False) if x is not None and grad is not None)

            cotangents = tuple(grad for grad in grads[:2] if grad is not None)
            by_sigma, by_value, by_bias = vector_jacobian(attended, (log_sigma, value, bias), cotangents)
            return by_sigma, None, None, by_value, by_bias, None, None
        grad_out, grad_lse = grads[:2]
        if grad_out is None:  # as if the values had no channels
            dtype = lse.dtype
            value, out, grad_out = (x.new_zeros(*x.shape[:2], 0, dtype=dtype) for x in (key, query, query))
            moments = moments[..., -1:]
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        h = (grad_lse - (grad_out.to(lse.dtype) * out).sum(-1))[..., None]  # (B, N, 1)
        by_sigma = (torch.cat([grad_out.to(lse.dtype), h], dim=-1) * moments).sum((1, 2)).to(log_sigma.dtype)
        by_value = by_bias = None
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            sums = _sums_over_queries(ctx.engine, ctx.tol, query, key, bias, lse, [grad_out, h], value.dtype)
            by_value = sums[0].to(value.dtype) if ctx.needs_input_grad[3] and value.shape[-1] else None
            if ctx.needs_input_grad[4]:
                by_bias = ((value * sums[0]).sum(-1) + sums[1][..., 0]).to(bias.dtype)
        return by_sigma, None, None, by_value, by_bias, None, None


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
