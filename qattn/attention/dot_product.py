"""Shared code of backends with dot-product kernels: lift the inputs for such a kernel, and read its results.

A kernel computes out = softmax(q̃ k̃ᵀ) ṽ and the lse of q̃ k̃ᵀ. Its inputs are lifted points, whole or split into 16-bit
parts, and padded to widths at which it is fast. Its lse then lacks the row constant of the lift, and its values may
have been scaled into the range of float16.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives, PairSums, PairTerms
from qattn.attention.engine import Backend
from qattn.attention.inputs import Inputs
from qattn.lift import SPLIT_UNIT, absent_bias, lift, pad, part_dtype, scale_values, split_columns, split_lift

__all__ = ["DotProduct", "DotProductBackend", "pair_sums_by", "prepare", "wants_sixteen_bits", "width"]

# Unit roundoffs of lifted scores, relative to ½(‖q‖ + ‖k‖)² + |b|. They cover the products, their sum, and the row
# constant that is added to the lse.
_UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
# CUTLASS multiplies float32 as big·big + big·small + small·big, each part with 10 explicit bits, the big one truncated.
# It leaves out small·small, up to 2⁻²⁰ |q||k| and always of the sign of the product, and rounds small at 2⁻²².
_UNIT_3XTF32 = 2.0**-20


def wants_sixteen_bits(inputs: Inputs) -> bool:
    """Return whether values, or points if there are no values, are 16-bit, so that a 16-bit kernel loses nothing."""
    return (inputs.query if inputs.value is None else inputs.value).dtype in (torch.float16, torch.bfloat16)


def width(inputs: Inputs, *, split: bool, multiple: int) -> int:
    """Compute the common width of q̃, k̃ and ṽ, a multiple of `multiple`."""
    D = inputs.key.shape[-1]
    columns = split_columns(D, part_dtype(inputs.extent)) if split else D + 1
    return -(-max(columns, inputs.channels) // multiple) * multiple


class DotProductBackend(Backend):
    """A backend whose kernels multiply lifted points."""

    @abstractmethod
    def is_split(self, inputs: Inputs) -> bool:
        """Return whether these inputs go to a 16-bit kernel, with the split lift."""

    def unit_roundoff(self, inputs: Inputs) -> float:
        """Return the unit roundoff u of lifted scores: the error of lse is about u (½(‖q‖ + ‖k‖)² + |b|)."""
        if self.is_split(inputs):
            return SPLIT_UNIT
        if inputs.device.type == "cuda" and inputs.dtype == torch.float32:
            # The memory-efficient kernel, in torch and in xformers, uses tensor cores where they take float32.
            has_tf32 = torch.cuda.get_device_capability(inputs.device) >= (8, 0)
            return _UNIT_3XTF32 if has_tf32 else _UNIT[torch.float32]
        return _UNIT[inputs.dtype]

    def reasons_of_lifting(self, inputs: Inputs) -> list[str]:
        """Return reasons against lifting: a score that is not Gaussian, lists of blocks, or too much cancellation."""
        if not inputs.is_gaussian:
            return ["the score is not the Gaussian one, so not a dot product of lifted points"]
        if inputs.blocks is not None:
            return ["lists of blocks"]
        if (error := inputs.extent.rounding(self.unit_roundoff(inputs))) > inputs.tol:
            return [f"lifting would lose about {error:.1e} of lse to cancellation, more than tol = {inputs.tol:.1e}"]
        return []


@dataclass(frozen=True)
class DotProduct:
    """Inputs of a dot-product kernel with scale 1.

    Attributes:
        inputs: Inputs before lifting.
        query: Shape (B, N, E).
        key: Shape (B, M, E).
        value: Shape (B, M, E); the key itself if there are no values.
        row: Row constants (B, N), to be added to the lse.
        scale: Factors (B, 1, C) by which the averages are multiplied; None for 1.
    """

    inputs: Inputs
    query: Tensor
    key: Tensor
    value: Tensor
    row: Tensor
    scale: Tensor | None

    def attended(self, out: Tensor, lse: Tensor) -> Attended:
        """Convert the kernel's out (B, N, ≥ C) and lse (B, ≥ N), whose rows some kernels pad, to attention."""
        value, bias = self.inputs.value, self.inputs.bias
        lse = lse[:, : self.row.shape[1]].to(self.row.dtype) + self.row
        # Kernels differ in what they return for a row without keys.
        is_empty = None if bias is None else (bias == -torch.inf).all(-1, keepdim=True)
        if is_empty is not None:
            lse = torch.where(is_empty, -torch.inf, lse)
        if value is None:
            return Attended(None, lse)
        mean = out[..., : value.shape[-1]]
        if is_empty is not None:
            mean = torch.where(is_empty[..., None], 0, mean)
        return Attended((mean if self.scale is None else self.scale * mean).to(value.dtype), lse)


def prepare(inputs: Inputs, *, split: bool, multiple: int) -> DotProduct:
    """Lift the inputs, in 16-bit parts if `split`, and pad them to a multiple of `multiple`."""
    E = width(inputs, split=split, multiple=multiple)
    query, key = inputs.embedded
    bias = None if inputs.bias is None else inputs.bias.to(inputs.dtype)
    scale = None
    if split:
        dtype = part_dtype(inputs.extent)
        lifted = split_lift(query, key, bias, dtype)
    else:
        dtype = inputs.dtype
        lifted = lift(query, key, bias)
    lifted_key = pad(lifted.key, E)
    if inputs.value is None:
        value = lifted_key
    elif split:
        value, scale = scale_values(inputs.value, dtype)
        value = pad(value, E)
    else:
        value = pad(inputs.value.to(dtype), E)
    return DotProduct(inputs, pad(lifted.query, E), lifted_key, value, lifted.row, scale)


Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def pair_sums_by(backward: Backward, inputs: Inputs, terms: PairTerms) -> PairSums:
    """Compute sums over pairs by the backward of a dot-product kernel.

    For cotangents R, values S and averages that are 0, a kernel computes Σ_j s̄_ij k̃_j, Σ_i s̄_ij q̃_i and Σ_i p_ij R_i,
    with p_ij = exp(q̃_i · k̃_j − shift_i) and s̄_ij = p_ij R_i · S_j. All sums that are needed can be read from those for

        q̃ = (q, −½‖q‖², 1, 1),     k̃ = (k, 1, b, −½‖k‖²).

    Args:
        backward: Function from grad, query, key, value (B, ·, E) and lse (B, N) to the cotangents of query, key and
            value.
        inputs: Points, bandwidths and biases.
        terms: Rows R, columns S and shifts; all sums are taken.
    """
    row, column, shift = terms[:3]
    query, key = inputs.embedded  # in units of σ
    D, dtype = query.shape[-1], inputs.dtype
    bias = inputs.biases.detach().to(dtype)
    bias = torch.where(bias == -torch.inf, absent_bias(dtype), bias)
    squares = [-0.5 * x.square().sum(-1, keepdim=True) for x in (query, key)]
    ones = torch.ones_like(squares[0])
    lifted_query = torch.cat([query, squares[0], ones, ones], dim=-1)
    lifted_key = torch.cat([key, torch.ones_like(squares[1]), bias[..., None], squares[1]], dim=-1)
    E = -(-max(D + 3, row.shape[-1]) // 16) * 16
    rows, queries, keys, columns = (pad(x.to(dtype), E) for x in (row, lifted_query, lifted_key, column))
    by_query, by_key, by_value = backward(rows, queries, keys, columns, shift.to(dtype))
    of_keys, total, of_squares = by_query[..., :D], by_query[..., D], -2 * by_query[..., D + 2]
    of_queries, column_total = by_key[..., :D], by_key[..., D + 1]
    first = of_keys - query * total[..., None]
    second = of_squares - (query * (of_keys + first)).sum(-1)
    column_first = key * column_total[..., None] - of_queries
    sigma = torch.ones(len(query), dtype=dtype, device=query.device) if inputs.sigma is None else inputs.sigma.to(dtype)
    scale = sigma[:, None]
    return PairSums(
        Derivatives(total, scale[..., None] * first, scale**2 * second),
        column_total,
        scale[..., None] * column_first,
        by_value[..., : terms.num_values],
    )
