r"""What attention returns, and how two such results join.

For scores s_ij the pair is lse_i = log Σ_j exp(s_ij) and out_i = Σ_j exp(s_ij − lse_i) v_j. Pairs over disjoint sets
of keys merge into the pair over their union, which is what sums of kernels, tiling and sharding are made of.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Attended", "merge", "sized"]

_LEAST_SIZE = 1e-6  # of the largest row, for those that are 0 but have a derivative


class Attended(NamedTuple):
    """The output of attention and the log of its row sums.

    Attributes:
        out: Weighted means of the values, shape (*batch, N, C); None if there were no values.
        lse: Log-sum-exp of the scores of each row, shape (*batch, N); −inf where no key is present, and `out` is 0
            there.
    """

    out: Tensor | None
    lse: Tensor


def merge(a: Attended, b: Attended) -> Attended:
    r"""Joins attention over two disjoint sets of keys: lse = log(e^a.lse + e^b.lse), out = the mean weighted by e^lse.

    Associative and commutative, with lse = −inf as its identity.

    Example:
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
    share = (weight_b / divisor)[..., None]
    dtype = torch.promote_types(share.dtype, a.out.dtype)  # 16 bits are too few for a share
    out = torch.lerp(a.out.to(dtype), b.out.to(dtype), share.to(dtype))
    return Attended(out.to(a.out.dtype), lse)


def sized(column: Tensor) -> tuple[Tensor, Tensor]:
    """log |v_j| (*batch, M) and v_j / |v_j| (*batch, M, C), in the maximum norm over the channels.

    Weights that contain the sizes of what they multiply let engines see which terms of a sum matter. Sizes have no
    gradient. Rows of 0 have no weight; where they have a derivative, one that is small.
    """
    size = column.detach().abs().amax(-1).to(torch.promote_types(column.dtype, torch.float32))
    if column.requires_grad and torch.is_grad_enabled() and size.numel():
        size = size.clamp(min=float(_LEAST_SIZE * size.amax()) or 1.0)
    is_zero = size == 0
    safe = torch.where(is_zero, 1, size)
    return torch.where(is_zero, -torch.inf, torch.log(safe)), (column / safe[..., None]).to(column.dtype)
