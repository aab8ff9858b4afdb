r"""Gradients of Gaussian attention.

With p_ij = exp(s_ij − lse_i), cotangents G of out and g of lse, and h_i = g_i − G_i · out_i, the score s_ij = b_j −
‖q_i − k_j‖² / 2σ² has the cotangent s̄_ij = p_ij (G_i · v_j + h_i), and

    q̄_i = Σ_j s̄_ij (k_j − q_i) / σ²,     k̄_j = Σ_i s̄_ij (q_i − k_j) / σ²,     σ̄ = Σ_ij s̄_ij ‖q_i − k_j‖² / σ³,
    b̄_j = Σ_i s̄_ij,     v̄_j = Σ_i p_ij G_i.

All but the last are sums of s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) over one side, with s̄_ij = p_ij R_i · S_j for rows R and
columns S. Engines that are `Differentiating` take these sums themselves. For all others, and for derivatives of higher
order, they are written with attention: columns times powers of coordinates are values of one more attend, whose weights
contain the sizes of the columns. So no engine needs a backward kernel of its own, and memory stays O(N).

Sums of products with coordinates cancel, and are taken in a dtype in which that does no harm: float32 or float64,
whatever the dtype of the values. Constants in the values cancel too, and are taken out first: out moves along with
them, and s̄ does not change.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qattn.attended import Attended, sized
from qattn.attention.backend import Derivatives, Differentiating, Engine
from qattn.attention.dispatch import select
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian

__all__ = ["attend_differentiably", "derivatives"]

_CANCELLED = 1e-4  # of a gradient, that rounding may take away


def attend_differentiably(inputs: Inputs, engine: Engine) -> Attended:
    """Attention by `engine`, with gradients of every order where any are asked for."""
    with torch.autocast(inputs.device.type, enabled=False):  # scores need the precision that they are given
        _refuse_forward_mode(inputs)
        if not inputs.is_gaussian or not inputs.needs_gradients:
            return engine.attend(inputs)
        tensors = inputs.query, inputs.key, inputs.value, inputs.bias, inputs.sigma
        return Attended(*_Attend.apply(*tensors, inputs.tol, engine))


def _refuse_forward_mode(inputs: Inputs) -> None:
    """Compiled loops would lose the tangents of dual numbers."""
    tensors = [x for x in (inputs.query, inputs.key, inputs.value, inputs.bias, inputs.sigma) if x is not None]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "qattn has no forward-mode derivatives, and would lose the tangents. Take reverse mode, or "
            "`torch.autograd.functional.jvp`, which goes backward twice."
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        sigma: Tensor | None,
        tol: float,
        engine: Engine,
    ) -> tuple[Tensor | None, Tensor]:
        return engine.attend(Inputs(query, key, value, bias, gaussian, tol, query.shape[:1], sigma))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        *tensors, ctx.tol, ctx.engine = inputs
        ctx.is_self = inputs[0] is inputs[1]
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        query, key, value, bias, sigma, out, lse = ctx.saved_tensors
        key = query if ctx.is_self else key
        grad_out, grad_lse = grads
        if grad_out is None:
            value = out = None
        inputs = Inputs(query, key, value, bias, gaussian, ctx.tol, query.shape[:1], sigma)
        needs_query, needs_key, needs_value, needs_bias, needs_sigma = ctx.needs_input_grad[:5]
        grad_query = grad_key = grad_value = grad_bias = grad_sigma = None
        if needs_value and grad_out is not None:
            grad_value = _by_value(ctx.engine, inputs, lse, grad_out)
        if needs_query or needs_key or needs_bias or needs_sigma:
            sides = _sides(ctx.engine, inputs, Attended(out, lse), grad_out, grad_lse, needs_sigma)
            sigmas = sides.inputs.sigma
            sigma_squared = 1.0 if sigmas is None else sigmas[:, None, None] ** 2
            found = None
            if needs_query:
                found = sides.over_keys(needs_sigma)
                grad_query = (found.first / sigma_squared).to(query.dtype)
            if needs_key or needs_bias or found is None:
                found = sides.over_queries(needs_sigma, needs_first=needs_key)
                grad_key = (found.first / sigma_squared).to(key.dtype) if needs_key else None
                grad_bias = found.total.to(bias.dtype) if needs_bias else None
            if needs_sigma and sigmas is not None:
                grad_sigma = (found.second.sum(-1) / sigmas**3).to(sigma.dtype)
        return grad_query, grad_key, grad_value, grad_bias, grad_sigma, None, None


def _by_value(engine: Engine, inputs: Inputs, lse: Tensor, grad_out: Tensor) -> Tensor:
    """Σ_i p_ij G_i, in the dtype of the values."""
    assert inputs.value is not None
    log_size, unit = sized(grad_out)
    bias = _finite_or_absent(-lse + log_size)
    back = Inputs(inputs.key, inputs.query, unit, bias, gaussian, inputs.tol, inputs.batch, inputs.sigma)
    means, scale = _again(engine.exchanged, back)
    assert means is not None
    scale = scale if inputs.bias is None else scale + inputs.bias
    return (torch.exp(scale)[..., None] * means).to(inputs.value.dtype)


def _or_zeros(bias: Tensor | None, key: Tensor) -> Tensor:
    """The bias (B, M) of keys (B, M, D), 0 by default."""
    return key.new_zeros(key.shape[:2]) if bias is None else bias


def _finite_or_absent(bias: Tensor) -> Tensor:
    """A bias with −inf instead of +inf and NaN: those of rows without any key, which have no weights."""
    return torch.where(bias < torch.inf, bias, -torch.inf)


def _again(engine: Engine, inputs: Inputs) -> Attended:
    """An attend of the backward pass: by the same engine if it takes these inputs too, else by what "auto" takes."""
    if engine.not_supported_reasons(inputs):
        engine = select(inputs, "auto")
    return attend_differentiably(inputs, engine)


class _Sides:
    """Both sides of an attention that is differentiated: s̄_ij = p_ij R_i · S_j with R = (G, h) and S = (v, 1).

    All tensors have the dtype that their sums are taken in.
    """

    def __init__(self, engine: Engine, inputs: Inputs, row: Tensor, column: Tensor, lse: Tensor) -> None:
        self._engine, self.inputs, self._row, self._column, self._lse = engine, inputs, row, column, lse

    def over_keys(self, needs_second: bool) -> Derivatives:
        """Sums over j for each query i."""
        shift = torch.where(self._lse == -torch.inf, torch.inf, self._lse)
        return derivatives(self._engine, self.inputs, self._row, self._column, shift, True, needs_second)

    def over_queries(self, needs_second: bool, needs_first: bool) -> Derivatives:
        """Sums over i for each key j."""
        inputs = self.inputs
        present = _finite_or_absent(-self._lse)
        bias = _or_zeros(inputs.bias, inputs.key)
        absent = torch.where(bias == -torch.inf, torch.inf, -bias)
        back = replace(inputs, query=inputs.key, key=inputs.query, bias=present)
        return derivatives(self._engine.exchanged, back, self._column, self._row, absent, needs_first, needs_second)


def _sides(
    engine: Engine,
    inputs: Inputs,
    attended: Attended,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs_sigma: bool,
) -> _Sides:
    """Rows and columns of s̄, without the constants in the values and in a dtype in which their sums are right."""
    (out, lse), value = attended, inputs.value
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    dtype = _dtype_of_sums(engine, inputs, lse, grad_out, grad_lse, needs_sigma)
    tensors = (None if x is None else x.to(dtype) for x in (inputs.query, inputs.key, value, inputs.bias, inputs.sigma))
    query, key, value, bias, sigma = tensors
    is_self = inputs.query is inputs.key
    inputs = replace(inputs, query=query, key=query if is_self else key, value=value, bias=bias, sigma=sigma)  # type: ignore[arg-type]
    if lse.dtype != dtype or (out is not None and out.dtype != dtype):
        out, lse = _again(engine, inputs)
    row, column = grad_lse.to(dtype)[..., None], torch.ones_like(inputs.key[..., :1])
    if value is not None and grad_out is not None and out is not None:
        constant = engine.ranks.mean(_or_zeros(bias, inputs.key).detach(), value.detach())
        value, out, grad_out = value - constant, out - constant, grad_out.to(dtype)
        row = torch.cat([grad_out, row - (grad_out * out).sum(-1, keepdim=True)], dim=-1)
        column = torch.cat([value, column], dim=-1)
    return _Sides(engine, inputs, row, column, lse)


def _dtype_of_sums(
    engine: Engine, inputs: Inputs, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor, needs_sigma: bool
) -> torch.dtype:
    """float64 if rounding in float32 would take more than `_CANCELLED` of a gradient away."""
    if lse.dtype == torch.float64:
        return lse.dtype
    counts = grad_lse != 0
    if grad_out is not None:
        counts = counts | (grad_out != 0).any(-1)
    bias = _or_zeros(inputs.bias, inputs.key).detach()
    is_present = bias > -torch.inf
    if _differentiates(engine, inputs):
        # Differences are right to their last digits: only scores of rows far from all keys are too large for them.
        top = engine.ranks.highest(bias.T)[:, None]
        size = torch.where(counts & (lse > -torch.inf), top - lse.detach(), 0).clamp(min=0)
    else:
        # Values times coordinates: differences of the order of a bandwidth are left of numbers as large as the cloud.
        query, key = (x.norm(dim=-1) for x in inputs.embedded)
        rows, columns = torch.where(counts, query, 0), torch.where(is_present, key, 0)
        size = torch.cat([rows, columns], dim=-1) ** (4 if needs_sigma else 2)
    largest = float(engine.ranks.largest(size).amax()) if len(size) else 0.0
    return torch.float64 if torch.finfo(torch.float32).eps * largest > _CANCELLED else torch.float32


def _differentiates(engine: Engine, inputs: Inputs) -> bool:
    return not torch.is_grad_enabled() and isinstance(engine, Differentiating) and engine.can_differentiate(inputs)


def derivatives(
    engine: Engine,
    inputs: Inputs,
    row: Tensor,
    column: Tensor,
    shift: Tensor,
    needs_first: bool = True,
    needs_second: bool = True,
) -> Derivatives:
    """Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) with s̄_ij = exp(s_ij − shift_i) R_i · S_j; 0 for what is not needed."""
    if _differentiates(engine, inputs):
        assert isinstance(engine, Differentiating)
        # Columns of 0 are left out: the biases of points far away, without a cotangent, would hide those of others.
        bias = torch.where((column == 0).all(-1), -torch.inf, _or_zeros(inputs.bias, inputs.key))
        return engine.differentiate(replace(inputs, bias=bias), row, column, shift)
    log_size, unit = sized(column)
    bias = log_size if inputs.bias is None else inputs.bias + log_size
    scale = 1.0 if inputs.sigma is None else inputs.sigma[:, None, None]
    # The points of several ranks are about an origin that all of them share.
    origin = replace(inputs, bias=bias).origin if engine.ranks.is_alone else 0
    query, key = (inputs.query - origin) / scale, (inputs.key - origin) / scale
    C, D = column.shape[-1], query.shape[-1]
    values = [unit]
    if needs_first or needs_second:
        values.append((unit[..., :, None] * key[..., None, :]).flatten(-2))  # (B, M, C D)
    if needs_second:
        values.append(unit * key.square().sum(-1, keepdim=True))
    means, lse = _again(engine, replace(inputs, value=torch.cat(values, dim=-1), bias=bias))
    assert means is not None
    weight = torch.exp(lse - shift)
    sums = (weight[..., None] * means).split([x.shape[-1] for x in values], dim=-1)
    total = (row * sums[0]).sum(-1)
    first, second = torch.zeros_like(query), torch.zeros_like(total)
    if needs_first or needs_second:
        plain = torch.einsum("bnc,bncd->bnd", row, sums[1].unflatten(-1, (C, D)))
        first = plain - query * total[..., None]
        if needs_second:
            second = (row * sums[2]).sum(-1) - (query * (plain + first)).sum(-1)
            second = second * (scale[..., 0] ** 2 if isinstance(scale, Tensor) else 1.0)
        first = first * scale
    return Derivatives(total, first, second)
