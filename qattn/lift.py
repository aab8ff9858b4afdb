r"""Lifted embeddings: Gaussian scores as dot products, for attention kernels that compute nothing else.

    −½‖q − k‖² + b = (q, −½‖q‖², 1) · (k, 1, b − ½‖k‖²)          d + 2 coordinates, as in the paper
                   = (q, 1) · (k, b − ½‖k‖²) − ½‖q‖²             d + 1, with a row constant added to the lse afterwards

The terms on the right are as large as ‖q‖² and cancel. So the cloud is centered first, and the rounding error is
estimated (`Extent.rounding`). For 16-bit kernels each coordinate is split into 16-bit parts, whose products are further
columns. A float16 or bfloat16 kernel with float32 accumulators is then about as exact as a float32 kernel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "SPLIT_UNIT",
    "Extent",
    "Lifted",
    "absent_bias",
    "center",
    "extent",
    "lift",
    "lift_full",
    "pad",
    "part_dtype",
    "scale_values",
    "split",
    "split_columns",
    "split_lift",
]

# Bias of an absent key; −inf would turn into NaN in a product. In float16 each of the three parts has it.
_ABSENT = {torch.float64: -1e30, torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -60000.0}
# Pairs of a part of q and a part of k that are multiplied, smallest products first: all pairs of two float16 parts, and
# the pairs of three bfloat16 parts that are above the rounding of float32.
_PRODUCTS = {
    torch.float16: ((1, 1), (0, 1), (1, 0), (0, 0)),
    torch.bfloat16: ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)),
}
_BIAS_PARTS = 3  # b − ½‖k‖² is the largest coordinate
# Unit roundoff of the scores of a split lift, relative to ½(‖q‖ + ‖k‖)² + |b|: tensor cores truncate each partial sum
# to 24 bits, and coordinates have 22.
SPLIT_UNIT = 2.0**-22
_FLOAT16_RANGE = 3e4  # half the largest float16, which keeps absent keys far below present ones


class Extent(NamedTuple):
    """Largest ‖q‖ and ‖k‖ about the center of the cloud, and largest finite |b|."""

    query: float
    key: float
    bias: float

    @property
    def largest(self) -> float:
        """Upper bound ½(‖q‖ + ‖k‖)² + |b| of all terms that cancel in a lifted score."""
        return 0.5 * (self.query + self.key) ** 2 + self.bias

    def rounding(self, unit: float) -> float:
        """Estimate the error u · (½(‖q‖ + ‖k‖)² + |b|) of the lse of a kernel whose scores have unit roundoff u."""
        return unit * self.largest


class Lifted(NamedTuple):
    """Embeddings whose dot products are the scores up to one constant per row, to be added to the lse."""

    query: Tensor  # (B, N, E)
    key: Tensor  # (B, M, E)
    row: Tensor  # (B, N)


def center(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Move the mean of the keys to the origin, which changes no difference."""
    mean = key.mean(dim=-2, keepdim=True)
    return query - mean, key - mean


def extent(query: Tensor, key: Tensor, bias: Tensor | None) -> Extent:
    """Measure a cloud about the mean of its keys."""
    query, key = center(query.detach(), key.detach())
    finite = torch.zeros(1) if bias is None else torch.where(bias.detach() == -torch.inf, 0, bias.detach())
    return Extent(
        *(float(x.amax()) if x.numel() else 0.0 for x in (query.norm(dim=-1), key.norm(dim=-1), finite.abs()))
    )


def absent_bias(dtype: torch.dtype) -> float:
    """Return the bias that stands for −inf in products."""
    return _ABSENT[dtype]


def _key_coordinate(key: Tensor, bias: Tensor | None, absent: float) -> Tensor:
    coordinate = -0.5 * (key * key).sum(-1)  # (B, M)
    return coordinate if bias is None else torch.where(bias == -torch.inf, absent, coordinate + bias)


def lift(query: Tensor, key: Tensor, bias: Tensor | None) -> Lifted:
    """Lift centered points to (q, 1) and (k, b − ½‖k‖²), d + 1 wide, with the row constant −½‖q‖²."""
    query, key = center(query, key)
    ones = torch.ones_like(query[..., :1])
    return Lifted(
        torch.cat([query, ones], dim=-1),
        torch.cat([key, _key_coordinate(key, bias, _ABSENT[key.dtype])[..., None]], dim=-1),
        -0.5 * (query * query).sum(-1),
    )


def lift_full(query: Tensor, key: Tensor, bias: Tensor | None, row: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lift to (q, r − ½‖q‖², 1) and (k, 1, b − ½‖k‖²), d + 2 wide: the full score, with a potential r of the query."""
    lifted = lift(query, key, bias)
    constant = lifted.row if row is None else lifted.row + row
    ones = torch.ones_like(key[..., :1])
    return (
        torch.cat([lifted.query[..., :-1], constant[..., None], lifted.query[..., -1:]], dim=-1),
        torch.cat([lifted.key[..., :-1], ones, lifted.key[..., -1:]], dim=-1),
    )


def part_dtype(size: Extent) -> torch.dtype:
    """Return the 16-bit dtype of the parts: float16, which is finer, unless its range is too small for the cloud."""
    return torch.float16 if size.largest < _FLOAT16_RANGE else torch.bfloat16


def split(x: Tensor, parts: int, dtype: torch.dtype) -> list[Tensor]:
    """Split x into `parts` tensors of a 16-bit dtype whose sum is about x, largest first."""
    result = []
    for _ in range(parts):
        result.append(x.to(dtype))
        x = x - result[-1].to(x.dtype)
    return result


def split_columns(dims: int, dtype: torch.dtype) -> int:
    """Return the width of a split lift: 15 in float16 and 21 in bfloat16 for points in space."""
    return dims * len(_PRODUCTS[dtype]) + _BIAS_PARTS


def split_lift(query: Tensor, key: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Lifted:
    """Lift to 16-bit parts: for q = Σ q_a and k = Σ k_b, columns whose products are q_a · k_b.

    Two things make it as exact as a float32 lift. The squared norms are those of the summed parts, so that splitting
    only moves the points by a millionth. And columns are ordered from small to large, the bias before the products with
    which it cancels, because a kernel rounds each partial sum to float32.
    """
    products = _PRODUCTS[dtype]
    parts = 1 + max(a for a, _ in products)
    queries, keys = (split(x, parts, dtype) for x in center(query, key))
    query, key = (torch.stack(x).to(query.dtype).sum(0) for x in (queries, keys))
    coordinates = [part[..., None] for part in split(_key_coordinate(key, bias, _ABSENT[dtype]), _BIAS_PARTS, dtype)]
    if bias is not None and dtype == torch.float16:  # keys far away may score as low as one part, but not as three
        absent = (bias == -torch.inf)[..., None]
        coordinates = [torch.where(absent, _ABSENT[dtype], part) for part in coordinates]
    ones = torch.ones_like(query[..., :1], dtype=dtype).expand(*query.shape[:-1], _BIAS_PARTS)
    *small, large = products
    return Lifted(
        torch.cat([*(queries[a] for a, _ in small), ones, queries[large[0]]], dim=-1),
        torch.cat([*(keys[b] for _, b in small), *reversed(coordinates), keys[large[1]]], dim=-1),
        -0.5 * (query * query).sum(-1),
    )


def scale_values(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale values into the range of a 16-bit dtype; also return the scale (B, 1, C), one power of two per channel."""
    exponent = torch.frexp(value.float().abs().amax(dim=1, keepdim=True)).exponent
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return (value.float() / scale).to(dtype), scale


def pad(x: Tensor, width: int) -> Tensor:
    """Pad the last axis with zeros to `width`."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
