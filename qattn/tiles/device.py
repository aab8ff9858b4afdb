"""Gaussian attention between two clouds on a GPU, and sums of its derivatives over pairs, by kernels of our own.

The counterpart of `tiles.gaussian` for GPUs: the same weights, the same cut-off and the same results, of float32
points. No pass copies anything to the host. The exception is the first pass with a cut-off, which asks how long lists
are.
"""

import functools
import importlib.util
import math
import os
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn._versions import why_old_triton
from qattn.attended import Attended, Derivatives, PairSums, PairTerms
from qattn.lift import Lifted, split, split_lift
from qattn.tiles.sizes import TILE
from qattn.tiles.tiling import FACTOR, excess, log2_sum

__all__ = [
    "DIMENSIONS",
    "LIFTED_WEIGHT",
    "Cutoff",
    "DeviceTiling",
    "attend",
    "differentiate",
    "is_interpreted",
    "why_not_installed",
]

DIMENSIONS = 16  # largest dimension: coordinates of a block are held in registers
_SMALLEST = 2.0**-126  # smaller weights are 0
_SUMMED = 16  # channels of a product R_i · S_j that are summed at a time
LIFTED_WEIGHT = 2.0**-17  # rounding of weights by lifted points, where they multiply values
_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # parts of bfloat16 that hold values
_MARGIN = 1.5  # memory for lists, relative to the longest list of the first pass
_MEMORY = 2**30  # bytes for lists: enough for all tiles of a million points
_PLACES = 16  # of which lists have a multiple, for which kernels are compiled


@functools.cache
def why_not_installed() -> str | None:
    """Return the reason why Triton cannot be used, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (`pip install triton`)"
    try:
        importlib.import_module("triton.language")
        version = importlib.import_module("triton").__version__
    except (ImportError, OSError) as error:
        return f"triton is installed, but does not import ({type(error).__name__}: {error})"
    if reason := why_old_triton(version):
        return reason
    if torch.cuda.is_available() and not is_interpreted():
        return _why_no_driver()
    return None


def _why_no_driver() -> str | None:
    """Return why Triton cannot launch kernels on this machine's GPU, or None. Its launcher is compiled here, once."""
    try:
        importlib.import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # no compiler, no headers of Python, no driver: whatever is missing
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return f"triton cannot launch kernels here, for which it needs a C compiler and Python.h ({reason})"
    return None


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels, on tensors of a CPU, as TRITON_INTERPRET=1 tells it to."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class DeviceTiling:
    """Points (B, N, D) of B clouds in tiles, on their device, the last point repeated to fill the last tile.

    Args:
        points: Coordinates.
        order: Order (B, N) of the points in the tiles, as from `kd_order`; None for the order of the cloud.

    Attributes:
        columns: Points coordinate by coordinate, (B, D, T · TILE).
    """

    def __init__(self, points: Tensor, order: Tensor | None = None) -> None:
        self.clouds, self.size, self.dims = points.shape
        self.tiles = -(-self.size // TILE)
        self._order = order
        points = self._sorted(points.detach().float())
        points = torch.cat([points, points[:, -1:].expand(-1, self.padded - self.size, -1)], dim=1)
        self.columns = points.mT.contiguous()

    @property
    def padded(self) -> int:
        """Number of points with those that fill the last tile."""
        return self.tiles * TILE

    @cached_property
    def boxes(self) -> Tensor:
        """Boxes (low, high) around the tiles, (B, 2 D, T)."""
        tiles = self.columns.unflatten(-1, (self.tiles, TILE))
        return torch.cat([tiles.amin(-1), tiles.amax(-1)], dim=1)

    @cached_property
    def _rank(self) -> Tensor:
        """Position of each point in the order, (B, N)."""
        assert self._order is not None
        return self._order.argsort(dim=1)

    def _sorted(self, x: Tensor) -> Tensor:
        return x if self._order is None else _take(x, self._order)

    def rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Sort x (B, N) or (B, N, C) into tiles, (B, T · TILE[, C]), with a number to fill the last tile."""
        missing = (0, self.padded - self.size)
        padded = pad(self._sorted(x), missing if x.ndim == 2 else (0, 0, *missing), value=fill)
        return padded.contiguous()  # which it is not if nothing is missing, and x is transposed

    def from_rows(self, x: Tensor) -> Tensor:
        """Undo `rows`."""
        x = x[:, : self.size]
        return x if self._order is None else _take(x, self._rank)

    def chunks(self, x: Tensor, width: int) -> Tensor:
        """Sort x (B, N, C) into tiles and chunks of channels, (chunks, B, T · TILE, width)."""
        rows = self.rows(pad(x.detach().float(), (0, -x.shape[-1] % width)))
        return rows.unflatten(-1, (-1, width)).permute(2, 0, 1, 3).contiguous()

    def from_chunks(self, x: Tensor, num_channels: int) -> Tensor:
        """Undo `chunks`."""
        return self.from_rows(x.permute(1, 2, 0, 3).flatten(-2)[..., :num_channels])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of x (B, N[, C]) by index (B, N)."""
    return x.gather(1, index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[2]))


class Cutoff(NamedTuple):
    """Tolerance of sums over near tiles only.

    Attributes:
        tol: Fraction of the sum of a row that may be left out.
        widths: Memory for the list of a tile, in tiles, by the cloud that attends. The first pass measures it. If a
            list is longer, its tile attends to all keys.
    """

    tol: float
    widths: dict[DeviceTiling, int]


class _Lists(NamedTuple):
    """Near tiles of each query tile. Lists that are longer than their memory stand for all tiles."""

    counts: Tensor | None  # (B, T) int32
    tiles: Tensor | None  # (B, T, width) int32


_ALL = _Lists(None, None)


class _Weights(NamedTuple):
    """Weights e^b = 2^(c β) e^top of the points of a tiling."""

    beta: Tensor  # (B, T · TILE), −inf in the padding
    top: Tensor  # (B, 1)


def attend(
    query: DeviceTiling,
    key: DeviceTiling,
    sigma: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    cutoff: Cutoff | None = None,
    is_lifted: bool = False,
) -> Attended:
    """Attend with the scores −‖q − k‖² / 2σ² + b.

    Args:
        query: Clouds that attend.
        key: Clouds attended to; the same object if clouds attend to themselves.
        sigma: Bandwidths (B,); 1 if None.
        value: Values (B, M, C) in the order of the clouds, or None for lse alone.
        bias: Biases (B, M), 0 if None.
        cutoff: Which keys may be left out; None to compute all pairs.
        is_lifted: Whether tensor cores compute the exponents, as dot products of points that are lifted in 16-bit
            parts: about twice as fast, with the rounding of a lift (`Extent.rounding`) and, beside values, that of
            weights (`LIFTED_WEIGHT`).
    """
    from qattn.tiles.gpu import operators  # here, because Triton is optional

    if value is not None and value.shape[-1] == 0:  # a launch for no channels would compute nothing
        lse = attend(query, key, sigma, None, bias, cutoff, is_lifted).lse
        return Attended(value.new_empty(query.clouds, query.size, 0), lse)
    bias = _biases(key, bias)
    scale = _scale(query, sigma)
    beta, top = _weights(key, bias, scale)
    near = _ALL
    if cutoff is not None:
        near = _near_tiles(query, key, scale, bias, bias if value is None else bias + excess(value, bias), cutoff)
    lse = beta.new_empty(query.clouds, query.padded)
    tiny = key.size * _SMALLEST / torch.finfo(torch.float32).eps  # sums above it are not affected by weights that are 0
    points = query.columns, key.columns, beta, scale, top
    lifted = _lifted(query, key, scale, beta) if is_lifted else None
    if value is None:
        if lifted is None:
            operators.sum_blocks(*points, near.counts, near.tiles, lse, tiny)
        else:
            operators.sum_lifted_blocks(*lifted, *points, near.counts, near.tiles, lse, tiny)
        return Attended(None, query.from_rows(lse))
    values = _chunked(key, value)
    out = values.new_empty(len(values), query.clouds, query.padded, values.shape[-1])
    if lifted is None:
        operators.attend_blocks(*points, values, near.counts, near.tiles, lse, out, tiny, _is_narrow(value))
    else:
        parts = torch.stack(split(values, _PARTS[value.dtype], torch.bfloat16), dim=2)
        operators.attend_lifted_blocks(*lifted, *points, parts, near.counts, near.tiles, lse, out, tiny)
    return Attended(query.from_chunks(out, value.shape[-1]).to(value.dtype), query.from_rows(lse))


def differentiate(
    query: DeviceTiling,
    key: DeviceTiling,
    sigma: Tensor | None,
    bias: Tensor | None,
    terms: PairTerms,
    cutoff: Cutoff | None = None,
) -> PairSums:
    """Compute sums over pairs of the terms s̄_ij = exp(s_ij − shift_i) R_i · S_j.

    Sums over keys are one pass over pairs, those over queries another, and those of values a third. No two programs add
    to the same sum, so that results are the same in every run.

    Args:
        query: Clouds that attend.
        key: Clouds attended to.
        sigma: Bandwidths (B,); 1 if None.
        bias: Biases (B, M) of the scores s, 0 if None.
        terms: Rows R, columns S and shifts, and the sums that are needed.
        cutoff: Terms that may be left out, fractions of Σ_j p_ij |S_j| and of Σ_i p_ij |R_i|; None to compute all.
    """
    bias, scale = _biases(key, bias), _scale(query, sigma)
    beta, top = _weights(key, bias, scale)
    row, column, shift = (x.detach().float() for x in terms[:3])
    shift = shift - top
    shifts = query.rows(shift / (scale[:, None] * math.log(2)), torch.inf)
    rows, columns = query.chunks(row, _SUMMED), key.chunks(column, _SUMMED)
    D = query.dims

    near = _ALL
    if cutoff is not None:
        sized = bias + torch.log(column.abs().amax(-1))
        near = _near_tiles(query, key, scale, sized, sized, cutoff)
    sums = query.from_rows(_summed(query, key, shifts, beta, scale, rows, columns, terms.by_points, near))
    result = PairSums(Derivatives(sums[..., 0], sums[..., 2:], sums[..., 1]))
    if not (terms.by_column or terms.num_values):
        return result
    if cutoff is not None:
        sized = torch.log(row.abs().amax(-1)) - shift
        near = _near_tiles(key, query, scale, sized, sized, cutoff)
    if terms.by_column:
        sums = key.from_rows(_summed(key, query, -beta, -shifts, scale, columns, rows, terms.by_points, near))
        result = result._replace(column_total=sums[..., 0], column_first=-sums[..., 2 : 2 + D])
    if terms.num_values:
        values = _summed_values(key, query, -beta, -shifts, scale, row[..., : terms.num_values], near)
        result = result._replace(values=values)
    return result


def _summed(
    query: DeviceTiling,
    key: DeviceTiling,
    shifts: Tensor,
    beta: Tensor,
    scale: Tensor,
    rows: Tensor,
    columns: Tensor,
    by_points: bool,
    near: _Lists,
) -> Tensor:
    """Compute Σ_j s̄_ij (1, ‖k_j − q_i‖², k_j − q_i), (B, T · TILE, 2 + D); the last are 0 if not by points."""
    from qattn.tiles.gpu import operators  # here, because Triton is optional

    sums = beta.new_zeros(query.clouds, 2 + query.dims, query.padded)
    step = 4 if query.dims <= 8 else 2  # coordinates at a time, so that their sums fit into registers
    for first in range(0, query.dims if by_points else 1, step):
        last = min(first + step, query.dims) if by_points else 0
        operators.differentiate_blocks(
            query.columns, shifts, key.columns, beta, scale, rows, columns, near.counts, near.tiles, sums, first, last
        )
    return sums.mT


def _summed_values(
    query: DeviceTiling, key: DeviceTiling, shifts: Tensor, beta: Tensor, scale: Tensor, value: Tensor, near: _Lists
) -> Tensor:
    """Compute Σ_j p_ij v_j (B, N, C) for values (B, M, C)."""
    from qattn.tiles.gpu import operators  # here, because Triton is optional

    values = _chunked(key, value)
    out = values.new_empty(len(values), query.clouds, query.padded, values.shape[-1])
    points = query.columns, shifts, key.columns, beta, scale
    operators.sum_values(*points, values, near.counts, near.tiles, out)
    return query.from_chunks(out, value.shape[-1])


def _near_tiles(
    query: DeviceTiling, key: DeviceTiling, scale: Tensor, bias: Tensor, most: Tensor, cutoff: Cutoff
) -> _Lists:
    """List the key tiles that matter to each query tile: row sums have weights e^bias, the cut-off e^most."""
    from qattn.tiles.gpu import operators  # here, because Triton is optional

    top = _top(bias)
    sums, tops = (_log2_of_tiles(key, (x - top) / math.log(2)) for x in (bias, most))
    floors = sums.new_full((query.clouds, query.tiles), -torch.inf)
    if query is key:  # the sum of a row is at least the term of the point itself
        floors = key.rows((bias - top) / math.log(2), torch.inf).unflatten(-1, (-1, TILE)).amin(-1)
    counts = torch.empty(floors.shape, dtype=torch.int32, device=floors.device)

    def listed(width: int) -> _Lists:
        lists = counts.new_empty(*counts.shape, width)
        operators.list_near_tiles(
            query.boxes, key.boxes, floors, tops, sums, scale, counts, lists, math.log2(cutoff.tol)
        )
        return _Lists(counts, lists)

    if query not in cutoff.widths:
        longest = int(listed(_PLACES).counts.amax())  # type: ignore[union-attr]
        width = min(math.ceil(_MARGIN * longest), key.tiles, _MEMORY // (counts.element_size() * counts.numel()))
        cutoff.widths[query] = _PLACES * max(1, -(-width // _PLACES))
    return listed(cutoff.widths[query])


def _log2_of_tiles(key: DeviceTiling, beta: Tensor) -> Tensor:
    """Compute log₂ Σ 2^β over tiles, (B, T), for β (B, M)."""
    return log2_sum(key.rows(beta, -torch.inf).unflatten(-1, (-1, TILE)))


def _biases(key: DeviceTiling, bias: Tensor | None) -> Tensor:
    return key.columns.new_zeros(key.clouds, key.size) if bias is None else bias.detach().float()


def _top(bias: Tensor) -> Tensor:
    """Return the largest bias of each cloud, (B, 1); 0 for clouds without keys."""
    top = bias.amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0, top)


def _weights(key: DeviceTiling, bias: Tensor, scale: Tensor) -> _Weights:
    """Convert biases (B, M) to base 2, relative to the largest of each cloud."""
    top = _top(bias)
    return _Weights(key.rows((bias - top) / (scale[:, None] * math.log(2)), -torch.inf), top)


def _scale(query: DeviceTiling, sigma: Tensor | None) -> Tensor:
    """Return c (B,) with exp(−‖x − y‖² / 2σ²) = 2^(−c ‖x − y‖²)."""
    if sigma is None:
        return query.columns.new_full((query.clouds,), FACTOR**2)
    return (FACTOR / sigma.detach().double()).square().float()


def _lifted(query: DeviceTiling, key: DeviceTiling, scale: Tensor, beta: Tensor) -> Lifted:
    """Lift points so that c (β_j − ‖q_i − k_j‖²) = q̃_i · k̃_j + r_i, about the mean of the keys that are not absent."""
    factor = torch.sqrt(2 * scale)[:, None, None]
    present = (beta > -torch.inf)[..., None]
    points = key.columns.mT  # (B, M, D)
    origin = torch.where(present, points, 0).sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp(min=1)
    queries, keys = factor * (query.columns.mT - origin), torch.where(present, factor * (points - origin), 0)
    lifted = split_lift(queries, keys, scale[:, None] * beta, torch.float16)
    missing = 0, -lifted.key.shape[-1] % 16
    return Lifted(pad(lifted.query, missing), pad(lifted.key, missing), lifted.row)


def _is_narrow(value: Tensor) -> bool:
    """Return whether 11 bits hold the values."""
    return value.dtype in (torch.float16, torch.bfloat16)


def _chunked(key: DeviceTiling, value: Tensor) -> Tensor:
    """Return values in chunks of a width with which no register spills."""
    most = 32 if key.dims <= 4 else 16
    return key.chunks(value, min(most, max(8, 1 << (value.shape[-1] - 1).bit_length())))
