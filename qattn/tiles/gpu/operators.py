"""The kernels as operators of torch, which write to tensors that are given to them.

`torch.compile` and `torch.export` see through these operators to the kernels, and fake tensors pass them. Constants
follow from shapes: those of blocks are chosen so that no register spills.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton import JITFunction

from qattn._devices import on_gpu_of
from qattn.tiles.gpu.cutoff import list_near_tiles as _list_near_tiles
from qattn.tiles.gpu.gaussian import attend_blocks as _attend_blocks
from qattn.tiles.gpu.gaussian import attend_lifted_blocks as _attend_lifted_blocks
from qattn.tiles.gpu.gaussian import differentiate_blocks as _differentiate_blocks
from qattn.tiles.gpu.gaussian import sum_blocks as _sum_blocks
from qattn.tiles.gpu.gaussian import sum_lifted_blocks as _sum_lifted_blocks
from qattn.tiles.gpu.gaussian import sum_values as _sum_values
from qattn.tiles.sizes import TILE

__all__ = [
    "attend_blocks",
    "attend_lifted_blocks",
    "differentiate_blocks",
    "list_near_tiles",
    "sum_blocks",
    "sum_lifted_blocks",
    "sum_values",
]

_COLUMNS = 32  # keys of a block: more would save instructions, but take registers that other warps need
_LIFTED_COLUMNS = 16  # where tensor cores compute the exponents of lse alone: a quarter of a tile
_COMPARED = 128  # tiles that are compared at a time


def _launch(kernel: Any, grid: tuple[int, ...], num_warps: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. Loads of the next block would take registers that sums need, so loops are not pipelined.

    Kernels know shapes and no strides. Triton launches on the current GPU, which need not be that of the tensors.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    assert all(x.is_contiguous() for x in tensors), kernel.__name__
    launched = wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel  # not, if it is interpreted
    with on_gpu_of(tensors[0]):
        launched[grid](*arguments, **constants, num_warps=num_warps, num_stages=1)


def _near(counts: Tensor | None, lists: Tensor | None) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Return lists of tiles, and the number of places in each."""
    return counts, lists, None if lists is None else lists.shape[-1]


def _constants(query: Tensor) -> dict[str, int]:
    """Return the constants that kernels over blocks of pairs have in common, for query (B, d, N)."""
    return {"DIMS": query.shape[1], "ROWS": TILE, "COLUMNS": _COLUMNS}


def _blocks(query: Tensor) -> int:
    """Return the number of tiles of all clouds (B, d, N)."""
    return query.shape[0] * query.shape[2] // TILE


def _warps(query: Tensor) -> int:
    """Return the number of warps of a program with which no register spills."""
    return 4 if query.shape[1] <= 8 else 8


def _products(is_narrow: bool) -> int:
    """Return how many products of tensor cores make one in float32; AMD's take float32."""
    return 1 if torch.version.hip else 2 if is_narrow else 3


# Returned so that torch can hash the kernels and discard stale compiled code.


@triton_op("qattn::sum_blocks", mutates_args={"lse"})
def sum_blocks(
    query: Tensor, keys: Tensor, beta: Tensor, scales: Tensor, tops: Tensor, counts: Tensor | None,
    lists: Tensor | None, lse: Tensor, tiny: float,
) -> None:  # fmt: skip
    """Compute lse (B, N); see the kernel."""
    return _launch(
        _sum_blocks, (_blocks(query),), _warps(query), query, keys, beta, scales, tops, *_near(counts, lists), lse,
        tiny, query.shape[2], keys.shape[2], **_constants(query),
    )  # fmt: skip


@triton_op("qattn::sum_lifted_blocks", mutates_args={"lse"})
def sum_lifted_blocks(
    lifted_query: Tensor, lifted_keys: Tensor, constants: Tensor, query: Tensor, keys: Tensor, beta: Tensor,
    scales: Tensor, tops: Tensor, counts: Tensor | None, lists: Tensor | None, lse: Tensor, tiny: float,
) -> None:  # fmt: skip
    """Compute lse (B, N) from lifted points (B, N, E) and (B, M, E), and constants (B, N)."""
    blocks = _constants(query) | {"COLUMNS": _LIFTED_COLUMNS, "LIFTED": lifted_keys.shape[-1]}
    return _launch(
        _sum_lifted_blocks, (_blocks(query),), 4, lifted_query, lifted_keys, constants, query, keys, beta, scales, tops,
        *_near(counts, lists), lse, tiny, query.shape[2], keys.shape[2], **blocks,
    )  # fmt: skip


@triton_op("qattn::attend_blocks", mutates_args={"lse", "out"})
def attend_blocks(
    query: Tensor, keys: Tensor, beta: Tensor, scales: Tensor, tops: Tensor, values: Tensor, counts: Tensor | None,
    lists: Tensor | None, lse: Tensor, out: Tensor, tiny: float, is_narrow: bool,
) -> None:  # fmt: skip
    """Compute lse (B, N) and out (chunks, B, N, C); values that are narrow have 11 bits."""
    chunks, clouds, _, channels = values.shape
    return _launch(
        _attend_blocks, (_blocks(query), chunks), _warps(query), query, keys, beta, scales, tops, values, 1.0,
        *_near(counts, lists), lse, out, tiny, clouds, query.shape[2], keys.shape[2], CHANNELS=channels,
        PRODUCTS=_products(is_narrow), **_constants(query),
    )  # fmt: skip


@triton_op("qattn::attend_lifted_blocks", mutates_args={"lse", "out"})
def attend_lifted_blocks(
    lifted_query: Tensor, lifted_keys: Tensor, constants: Tensor, query: Tensor, keys: Tensor, beta: Tensor,
    scales: Tensor, tops: Tensor, parts: Tensor, counts: Tensor | None, lists: Tensor | None, lse: Tensor,
    out: Tensor, tiny: float,
) -> None:  # fmt: skip
    """Compute lse (B, N) and out (chunks, B, N, C) from lifted points, and values in parts (chunks, B, parts, M, C)."""
    chunks, clouds, num_parts, _, channels = parts.shape
    return _launch(
        _attend_lifted_blocks, (_blocks(query), chunks), 4, lifted_query, lifted_keys, constants, query, keys, beta,
        scales, tops, parts, 1.0, *_near(counts, lists), lse, out, tiny, clouds, query.shape[2], keys.shape[2],
        LIFTED=lifted_keys.shape[-1], CHANNELS=channels, PARTS=num_parts, **_constants(query),
    )  # fmt: skip


@triton_op("qattn::sum_values", mutates_args={"out"})
def sum_values(
    query: Tensor, shifts: Tensor, keys: Tensor, beta: Tensor, scales: Tensor, values: Tensor, counts: Tensor | None,
    lists: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Compute out (chunks, B, N, C), sums of values that are not divided by those of weights."""
    chunks, clouds, _, channels = values.shape
    return _launch(
        _sum_values, (_blocks(query), chunks), _warps(query), query, shifts, keys, beta, scales, values, 1.0,
        *_near(counts, lists), out, clouds, query.shape[2], keys.shape[2], CHANNELS=channels,
        PRODUCTS=_products(False), **_constants(query),
    )  # fmt: skip


@triton_op("qattn::differentiate_blocks", mutates_args={"sums"})
def differentiate_blocks(
    query: Tensor, shifts: Tensor, keys: Tensor, beta: Tensor, scales: Tensor, rows: Tensor, columns: Tensor,
    counts: Tensor | None, lists: Tensor | None, sums: Tensor, first: int, last: int,
) -> None:  # fmt: skip
    """Compute sums (B, 2 + d, N) of the coordinates from `first` to `last`, and the first two if `first` is 0."""
    chunks, clouds, _, channels = rows.shape
    return _launch(
        _differentiate_blocks, (_blocks(query),), 4, query, shifts, keys, beta, scales, rows, columns,
        *_near(counts, lists), sums, chunks, clouds, query.shape[2], keys.shape[2], FIRST=first, LAST=last,
        CHANNELS=channels, PRODUCTS=_products(False), **_constants(query),
    )  # fmt: skip


@triton_op("qattn::list_near_tiles", mutates_args={"counts", "lists"})
def list_near_tiles(
    queries: Tensor, keys: Tensor, floors: Tensor, tops: Tensor, sums: Tensor, scales: Tensor, counts: Tensor,
    lists: Tensor, log_tol: float,
) -> None:  # fmt: skip
    """Count near tiles (B, T), and list as many of them as fit into lists (B, T, width)."""
    return _launch(
        _list_near_tiles, (counts.numel(),), 4, queries, keys, floors, tops, sums, scales, *_near(counts, lists),
        log_tol, queries.shape[2], keys.shape[2], DIMS=queries.shape[1] // 2, BLOCK=_COMPARED,
    )  # fmt: skip
