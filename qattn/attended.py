r"""Results of attention, and how two of them join.

For scores s_ij, attention gives lse_i = log Σ_j exp(s_ij) and out_i = Σ_j exp(s_ij − lse_i) v_j. Results over disjoint
sets of keys merge into the result over their union: sums of kernels, tiling and sharding are made of that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Attended", "Derivatives", "PairSums", "PairTerms", "balanced", "merge", "power_of_2", "sized"]

_MIN_SIZE = 1e-6  # of the largest row, for rows that are 0 but have a derivative


class Attended(NamedTuple):
    """Output of attention and the log of its row sums.

    Attributes:
        out: Weighted means of the values, shape (*batch, N, C); None without values.
        lse: Log-sum-exp of the scores of each row, shape (*batch, N). Where no key is present it is −inf, and `out` 0.
    """

    out: Tensor | None
    lse: Tensor


class Derivatives(NamedTuple):
    """Sums over keys that gradients are made of: Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²).

    Attributes:
        total: Σ_j s̄_ij, shape (B, N).
        first: Σ_j s̄_ij (k_j − q_i), shape (B, N, D).
        second: Σ_j s̄_ij ‖k_j − q_i‖², shape (B, N).
    """

    total: Tensor
    first: Tensor
    second: Tensor


class PairTerms(NamedTuple):
    """Terms s̄_ij = p_ij R_i · S_j with p_ij = exp(s_ij − shift_i), and which sums of them are needed.

    Attributes:
        row: Rows R (B, N, C).
        column: Columns S (B, M, C).
        shift: Shifts (B, N).
        by_points: Whether sums with k_j − q_i are needed; they are 0 otherwise.
        by_column: Whether sums over queries are needed.
        num_values: Number of channels C′ of R for which Σ_i p_ij R_i is needed.
    """

    row: Tensor
    column: Tensor
    shift: Tensor
    by_points: bool = True
    by_column: bool = False
    num_values: int = 0


class PairSums(NamedTuple):
    """Sums of derivatives over the keys of each query, and over the queries of each key.

    Attributes:
        rows: Sums over keys.
        column_total: Σ_i s̄_ij, shape (B, M); None if not computed.
        column_first: Σ_i s̄_ij (k_j − q_i), shape (B, M, D); None if not computed.
        values: Σ_i p_ij R_i of the first channels, shape (B, M, C′); None if not computed.
    """

    rows: Derivatives
    column_total: Tensor | None = None
    column_first: Tensor | None = None
    values: Tensor | None = None


def merge(a: Attended, b: Attended) -> Attended:
    r"""Join attention over two disjoint sets of keys: lse = log(exp(a.lse) + exp(b.lse)), and the mean of out.

    Associative and commutative; lse = −inf is the identity.

    Examples:
        >>> query, key, value = torch.randn(5, 3), torch.randn(8, 3), torch.randn(8, 2)
        >>> whole = attend(query, key, value)
        >>> halves = merge(attend(query, key[:4], value[:4]), attend(query, key[4:], value[4:]))
        >>> torch.testing.assert_close(whole, halves)
    """
    if (a.out is None) != (b.out is None):
        raise ValueError(
            "`merge` joins two results with values or two without; one of these has `out` None. Attend both alike."
        )
    largest = torch.maximum(a.lse, b.lse)
    largest = torch.where(largest == -torch.inf, 0, largest)  # two empty rows: their weights are 0, not exp(−inf + inf)
    weight_a, weight_b = torch.exp(a.lse - largest), torch.exp(b.lse - largest)  # (*batch, N)
    total = weight_a + weight_b
    is_empty = total == 0
    divisor = torch.where(is_empty, 1, total)
    lse = torch.where(is_empty, -torch.inf, largest + torch.log(divisor))
    if a.out is None or b.out is None:
        return Attended(None, lse)
    dtype = torch.promote_types(lse.dtype, a.out.dtype)  # 16 bits are too few for a share
    # Both shares by themselves: 1 minus the larger would have none of the digits of the smaller.
    share_a, share_b = ((weight / divisor)[..., None].to(dtype) for weight in (weight_a, weight_b))
    return Attended((share_a * a.out + share_b * b.out).to(a.out.dtype), lse)


def sized(column: Tensor) -> tuple[Tensor, Tensor]:
    """Split a column v (*batch, M, C) into log |v_j| (*batch, M) and v_j / |v_j|, in the maximum norm over channels.

    Weights that contain the sizes of what they multiply show engines which terms of a sum matter. Sizes have no
    gradient. Rows of 0 have no weight, or a small one if they have a derivative.
    """
    size = column.detach().abs().amax(-1).to(torch.promote_types(column.dtype, torch.float32))
    if column.requires_grad and torch.is_grad_enabled() and size.numel():
        size = size.clamp(min=float(_MIN_SIZE * size.amax()) or 1.0)
    is_zero = size < torch.finfo(size.dtype).tiny  # the reciprocal of a smaller one may be infinite
    divisor = torch.where(is_zero, 1, size)
    return torch.where(is_zero, -torch.inf, torch.log(divisor)), (column / divisor[..., None]).to(column.dtype)


def power_of_2(x: Tensor) -> Tensor:
    """Return a power of two near the largest |x| of each item of the batch, (B, 1, 1); 1 where all x are 0."""
    largest = x.detach().abs().amax((-2, -1), keepdim=True) if x.numel() else x.new_zeros(len(x), 1, 1)
    return torch.where(largest > 0, torch.exp2(torch.frexp(largest).exponent.to(x.dtype).clamp(-126, 126)), 1)


def balanced(row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale rows (G, h) and columns (v, 1) so that v is of order 1, with R_i · S_j unchanged.

    Then a cut-off that sees the largest |R_i| of all channels leaves out nothing that matters to Σ_i p_ij G_i either.

    Returns:
        Rows, columns, and the power of two (B, 1, 1) by which G was multiplied.
    """
    size = power_of_2(column[..., :-1])
    factors = torch.cat([size.expand(-1, 1, column.shape[-1] - 1), torch.ones_like(size)], dim=-1)
    return row * factors, column / factors, size
