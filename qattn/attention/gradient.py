r"""Gradients of Gaussian attention.

With p_ij = exp(s_ij − lse_i), cotangents G of out and g of lse, and h_i = g_i − G_i · out_i, the score s_ij = b_j −
‖q_i − k_j‖² / 2σ² has the cotangent s̄_ij = p_ij (G_i · v_j + h_i), and

    q̄_i = Σ_j s̄_ij (k_j − q_i) / σ²,     k̄_j = Σ_i s̄_ij (q_i − k_j) / σ²,     σ̄ = Σ_ij s̄_ij ‖q_i − k_j‖² / σ³,
    b̄_j = Σ_i s̄_ij,     v̄_j = Σ_i p_ij G_i.

All but the last are sums of s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) over one side, with s̄_ij = p_ij R_i · S_j for rows R and
columns S. `Differentiating` engines compute these sums themselves. All other engines, and derivatives of higher order,
compute them by attention: columns times powers of coordinates are the values of one more attend, whose weights contain
the sizes of the columns. So no engine needs a backward kernel of its own, and memory stays O(N).

Sums of products with coordinates cancel, so they are taken in float32, or in float64 where float32 would lose too much,
whatever the dtype of the values. Constants in the values cancel too. They are first subtracted from both values and
out, which leaves s̄ unchanged.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qattn._autocast import without_autocast
from qattn.attended import Attended, Derivatives, PairSums, PairTerms, balanced, power_of_2, sized
from qattn.attention.engine import Differentiating, Engine, Fused
from qattn.attention.inputs import Inputs

__all__ = ["derivatives", "differentiable"]

_CANCELLED = 1e-4  # fraction of a gradient that rounding may take away


def differentiable(engine: Engine, inputs: Inputs) -> Attended:
    """Attend with an engine, differentiably to every order if any of the inputs requires gradients."""
    with torch.autocast(inputs.device.type, enabled=False):  # scores need the precision of their inputs
        _refuse_forward_mode(inputs)
        if not inputs.is_gaussian or not inputs.needs_gradients:
            return engine.attend(inputs)
        # One by one: autograd does not see tensors inside of `inputs`.
        return Attended(*_Attend.apply(*inputs.tensors, inputs, engine))


def _refuse_forward_mode(inputs: Inputs) -> None:
    """Raise if the inputs are dual numbers, whose tangents compiled loops would lose."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs.tensors if x is not None):
        raise NotImplementedError(
            "qattn does not support forward-mode differentiation. Use reverse mode, or "
            "`torch.autograd.functional.jvp`, which differentiates in reverse twice."
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        sigma: Tensor | None,
        options: Inputs,
        engine: Engine,
    ) -> tuple[Tensor | None, Tensor]:
        return engine.attend(replace(options, query=query, key=key, value=value, bias=bias, sigma=sigma))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        *tensors, options, ctx.engine = inputs
        ctx.tol, ctx.is_self = options.tol, tensors[0] is tensors[1]
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sigma, out, lse = ctx.saved_tensors
        key = query if ctx.is_self else key
        grad_out, grad_lse = grads
        if grad_out is None:
            value = out = None
        inputs = Inputs(query, key, value, bias, sigma, tol=ctx.tol)
        needs = _Needs(*ctx.needs_input_grad[:5])
        gradients = _gradients(ctx.engine.for_gradients, inputs, Attended(out, lse), grad_out, grad_lse, needs)
        return *gradients, None, None


class _Needs(NamedTuple):
    """Tensors whose gradients are needed."""

    query: bool
    key: bool
    value: bool
    bias: bool
    sigma: bool

    @property
    def points(self) -> bool:
        return self.query or self.key


def _gradients(
    engine: Engine,
    inputs: Inputs,
    attended: Attended,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: _Needs,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients by query, key, value, bias and sigma; None for those not needed."""
    if not (needs.points or needs.bias or needs.sigma):
        grad_value = None if grad_out is None else _by_value(engine, inputs, attended.lse, grad_out)
        return None, None, grad_value, None, None
    sides = _sides(engine, inputs, attended, grad_out, grad_lse, needs.sigma)
    needs = needs._replace(value=needs.value and grad_out is not None)
    if _differentiates(engine, sides.inputs) and isinstance(engine, Fused):
        sums = sides.fused(engine, needs)
    else:
        sums = sides.composed(needs)
        if needs.value and grad_out is not None:
            sums = sums._replace(values=_by_value(engine, inputs, attended.lse, grad_out))
    sigma = sides.inputs.sigma
    width = 1.0 if sigma is None else sigma[:, None, None]  # divided by one after the other: powers may overflow
    gradients = (
        sums.rows.first / width / width if needs.query else None,
        -sums.column_first / width / width if needs.key and sums.column_first is not None else None,
        sums.values if needs.value else None,
        sums.column_total if needs.bias else None,
        sums.rows.second.sum(-1) / sigma / sigma / sigma if needs.sigma and sigma is not None else None,
    )
    return tuple(
        None if gradient is None or tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, inputs.tensors, strict=True)
    )


def _by_value(engine: Engine, inputs: Inputs, lse: Tensor, grad_out: Tensor) -> Tensor:
    """Compute v̄_j = Σ_i p_ij G_i, in the dtype of the values."""
    assert inputs.value is not None
    log_size, unit = sized(grad_out)
    bias = _finite_or_absent(-lse + log_size)
    back = replace(inputs, query=inputs.key, key=inputs.query, value=unit, bias=bias)
    means, scale = differentiable(engine.transposed, back)
    assert means is not None
    scale = scale if inputs.bias is None else scale + inputs.bias
    return (torch.exp(scale)[..., None] * means).to(inputs.value.dtype)


def _finite_or_absent(bias: Tensor) -> Tensor:
    """Replace +inf and NaN in a bias, which come from rows without keys, by −inf."""
    return torch.where(bias < torch.inf, bias, -torch.inf)


class _Sides:
    """Rows and columns of the cotangent of the scores: s̄_ij = p_ij R_i · S_j with R = (G, h) and S = (v, 1).

    All tensors have the dtype in which the sums are taken.
    """

    def __init__(self, engine: Engine, inputs: Inputs, row: Tensor, column: Tensor, lse: Tensor) -> None:
        self._engine, self.inputs, self._row, self._column, self._lse = engine, inputs, row, column, lse

    @property
    def _shift(self) -> Tensor:
        """Shift of each row, lse; rows without keys have no weights."""
        return torch.where(self._lse == -torch.inf, torch.inf, self._lse)

    def fused(self, engine: Fused, needs: _Needs) -> PairSums:
        """Take all sums in one pass."""
        row, column, size = balanced(self._row, self._column)
        unit = power_of_2(row)  # (B, 1, 1)
        terms = PairTerms(
            row / unit,
            column,
            self._shift,
            by_points=needs.points,
            by_column=needs.key or needs.bias,
            num_values=row.shape[-1] - 1 if needs.value else 0,
        )
        (total, first, second), column_total, column_first, values = engine.pair_sums(self.inputs, terms)
        return PairSums(
            Derivatives(unit[..., 0] * total, unit * first, unit[..., 0] * second),
            None if column_total is None else unit[..., 0] * column_total,
            None if column_first is None else unit * column_first,
            None if values is None else unit / size * values,
        )

    def composed(self, needs: _Needs) -> PairSums:
        """Take the sums over keys, and those over queries, one after the other, except those of values."""
        rows = columns = None
        if needs.query:
            rows = derivatives(self._engine, self.inputs, self._row, self._column, self._shift, True, needs.sigma)
        if needs.key or needs.bias or rows is None:
            inputs, bias = self.inputs, self.inputs.biases
            absent = torch.where(bias == -torch.inf, torch.inf, -bias)
            back = replace(inputs, query=inputs.key, key=inputs.query, bias=_finite_or_absent(-self._lse))
            engine = self._engine.transposed
            columns = derivatives(engine, back, self._column, self._row, absent, needs.key, needs.sigma)
        if columns is None:
            assert rows is not None
            return PairSums(rows)
        return PairSums(columns if rows is None else rows, columns.total, -columns.first)


def _sides(
    engine: Engine,
    inputs: Inputs,
    attended: Attended,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs_sigma: bool,
) -> _Sides:
    """Compute the rows and columns of s̄ in a dtype in which their sums are accurate, with centered values."""
    out, lse = attended
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    dtype = _dtype_of_sums(engine, inputs, lse, grad_out, grad_lse, needs_sigma)
    query, key, value, bias, sigma = (None if x is None else x.to(dtype) for x in inputs.tensors)
    is_self = inputs.query is inputs.key
    inputs = replace(inputs, query=query, key=query if is_self else key, value=value, bias=bias, sigma=sigma)  # type: ignore[arg-type]
    if lse.dtype != dtype or (out is not None and out.dtype != dtype):
        out, lse = differentiable(engine, inputs)
    row, column = grad_lse.to(dtype)[..., None], torch.ones_like(inputs.key[..., :1])
    if value is not None and grad_out is not None and out is not None:
        constant = engine.ranks.mean(inputs.biases.detach(), value.detach())
        value, out, grad_out = value - constant, out - constant, grad_out.to(dtype)
        row = torch.cat([grad_out, row - (grad_out * out).sum(-1, keepdim=True)], dim=-1)
        column = torch.cat([value, column], dim=-1)
    return _Sides(engine, inputs, row, column, lse)


def _dtype_of_sums(
    engine: Engine, inputs: Inputs, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor, needs_sigma: bool
) -> torch.dtype:
    """Return float64 if rounding in float32 would cost more than `_CANCELLED` of a gradient, else float32."""
    if lse.dtype == torch.float64:
        return lse.dtype
    counts = grad_lse != 0
    if grad_out is not None:
        counts = counts | (grad_out != 0).any(-1)
    bias = inputs.biases.detach()
    if _differentiates(engine, inputs) and isinstance(engine, Differentiating) and engine.is_direct(inputs):
        # Differences are exact to rounding: only the scores of rows far from all keys are too large for float32.
        largest_bias = engine.ranks.highest(bias.T)[:, None]
        size = torch.where(counts & (lse > -torch.inf), largest_bias - lse.detach(), 0).clamp(min=0)
    else:
        # Products with coordinates as large as the cloud cancel to differences of the order of a bandwidth.
        query, key = (x.norm(dim=-1) for x in inputs.embedded)
        rows, columns = torch.where(counts, query, 0), torch.where(bias > -torch.inf, key, 0)
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
    """Compute Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²), s̄_ij = exp(s_ij − shift_i) R_i · S_j; 0 for sums not needed."""
    # Columns of 0 are left out: large biases of points without a cotangent would hide those of all others.
    present = replace(inputs, bias=torch.where((column == 0).all(-1), -torch.inf, inputs.biases))
    if _differentiates(engine, present):
        assert isinstance(engine, Differentiating)
        return engine.differentiate(present, row, column, shift)
    log_size, unit = sized(column)
    bias = log_size if inputs.bias is None else inputs.bias + log_size
    scale = 1.0 if inputs.sigma is None else inputs.sigma[:, None, None]
    # Sharded points have an origin that all ranks share already.
    origin = replace(inputs, bias=bias).origin if engine.ranks.is_alone else 0
    query, key = (inputs.query - origin) / scale, (inputs.key - origin) / scale
    C, D = column.shape[-1], query.shape[-1]
    values = [unit]
    if needs_first or needs_second:
        values.append((unit[..., :, None] * key[..., None, :]).flatten(-2))  # (B, M, C D)
    if needs_second:
        values.append(unit * key.square().sum(-1, keepdim=True))
    means, lse = differentiable(engine, replace(inputs, value=torch.cat(values, dim=-1), bias=bias))
    assert means is not None
    weight = torch.exp(lse - shift)
    sums = (weight[..., None] * means).split([x.shape[-1] for x in values], dim=-1)
    total = (row * sums[0]).sum(-1)
    first, second = torch.zeros_like(query), torch.zeros_like(total)
    if needs_first or needs_second:
        # No product of matrices, which autocast would round if it is differentiated again.
        by_key = (row[..., None] * sums[1].unflatten(-1, (C, D))).sum(-2)
        first = by_key - query * total[..., None]
        if needs_second:
            second = (row * sums[2]).sum(-1) - (query * (by_key + first)).sum(-1)
            second = second * (scale[..., 0] ** 2 if isinstance(scale, Tensor) else 1.0)
        first = first * scale
    return Derivatives(total, first, second)
