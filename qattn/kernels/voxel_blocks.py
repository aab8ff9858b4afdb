r"""Gaussian sums over the occupied cells of a grid, one axis after the other: y_i = Σ_j Π_a t_a(|i_a − j_a|) w_j.

Cells are stored in blocks of side B. Only blocks that are needed are stored: most of them for a solid, few for a thin
shell. The pass along an axis multiplies a block and its neighbors within reach by a matrix of taps,

    out[block] = Σ_o G_o in[block + o],        (G_o)_ji = t(|i + oB − j|).

A path from one occupied block to another, axis by axis, may leave the occupied blocks. After axis a it is within reach
of occupied blocks along the axes before, and along the axes still to come, so the blocks that are needed are

    S_0 = occupied,        S_a = dilate_a(S_{a−1}) ∩ dilate_{a+1,…}(occupied),

the last of which are the occupied blocks again. With the taps t(d) = e^{−τ (hd)²} the sums are symmetric in i and j,
and their derivative by τ has the taps −(hd)² t(d) along one axis at a time. So gradients are sums of the same kind.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Blocks"]

_SIZES = (8, 16, 32, 64)
_OVERHEAD = 8  # measured overhead per block, in cells along its side
_CHUNK = 2**22  # numbers gathered at a time; fewer are slower on a busy machine
_GROUP = 2**23  # numbers per group of columns that are processed at a time


class Blocks:
    """The occupied cells of a grid with 1, 2 or 3 axes, in blocks.

    Args:
        index: Coordinates of the N cells, (N,) per axis, sorted with the last axis the fastest.
        reach: Approximate reach of the sums along each axis, in cells, which determines the size of the blocks.
    """

    def __init__(self, index: Sequence[Tensor], reach: Sequence[int]) -> None:
        index = [i - i.amin() for i in index]
        self.extent = [int(i.amax()) for i in index]
        self.size = _best_size(index, self.extent, [min(R, last) for R, last in zip(reach, self.extent, strict=True)])
        self._counts = _block_counts(self.extent, self.size)
        number, self._keys = _occupied(index, self._counts, self.size)
        offset = _ravel([i % self.size for i in index], [self.size] * len(index))
        self._place = number * self.size ** len(index) + offset  # (N,)
        self._tables: dict[tuple[int, ...], list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def cells(self) -> int:
        """Number of cells per block."""
        return self.size ** len(self.extent)

    def to(self, device: torch.device) -> "Blocks":
        """Return the same blocks on another device."""
        blocks = object.__new__(Blocks)
        blocks.__dict__.update(self.__dict__, _place=self._place.to(device), _keys=self._keys.to(device), _tables={})
        return blocks

    def smooth(self, columns: Tensor, tau: Tensor, spacing: Sequence[float], reach: Sequence[int]) -> Tensor:
        """Compute Σ_j e^{−τ ‖h(i − j)‖²} w_j over cells within reach, for columns w (N, C), differentiably."""
        return _Smooth.apply(columns, tau, self, tuple(spacing), tuple(reach), (0,) * len(self.extent))

    def sums(self, columns: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Compute Σ_j Π_a t_a(|i_a − j_a|) w_j for columns w (N, C), and taps t_a(0), …, t_a(reach)."""
        if columns.numel() == 0:
            return columns.clone()
        blocks_reached = tuple(-(-(len(t) - 1) // self.size) for t in taps)
        tables = self._neighbors(blocks_reached)
        matrices = [_toeplitz(t, r, self.size) for t, r in zip(taps, blocks_reached, strict=True)]
        cells = self.cells
        largest = max(len(self), *map(len, tables)) * cells
        results = []
        for group in columns.split(max(1, _GROUP // largest), dim=1):
            C = group.shape[1]
            x = columns.new_zeros(len(self) + 1, cells, C)
            x.view(-1, C).index_copy_(0, self._place, group)
            for table, matrix in zip(tables, matrices, strict=True):
                x = _pass(x.view(len(x), self.size, -1), table, matrix)
            # Each pass moves its axis to the end, so that the channels come first at last.
            results.append(x.view(len(x), C, cells).mT.reshape(-1, C).index_select(0, self._place))
        return torch.cat(results, dim=1) if len(results) > 1 else results[0]

    def _neighbors(self, reach: tuple[int, ...]) -> list[Tensor]:
        """Return, per axis, the blocks (n, 2r + 1) of S_{a−1} that the n blocks of S_a read; a last block is zero."""
        if reach in self._tables:
            return self._tables[reach]
        axes, device = len(reach), self._keys.device
        padded = [count + 2 * r for count, r in zip(self._counts, reach, strict=True)]  # so that steps do not wrap
        coordinates = torch.unravel_index(self._keys, self._counts)
        occupied = _ravel([c + r for c, r in zip(coordinates, reach, strict=True)], padded)
        steps = [torch.arange(-r, r + 1, device=device) * math.prod(padded[axis + 1 :]) for axis, r in enumerate(reach)]
        tables, support = [], occupied
        for axis in range(axes):
            next_support = occupied
            for other in range(axis + 1, axes):
                next_support = self._dilate(next_support, steps[other])
            reached = self._dilate(support, steps[axis])
            next_support = next_support[_find(reached, next_support) < len(reached)]
            _check_size(len(next_support) * self.size**axes, len(self._place))
            tables.append(_find(support, next_support[:, None] + steps[axis]))
            support = next_support
        self._tables[reach] = tables
        return tables

    def _dilate(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Return the sorted keys of all blocks within some steps of others."""
        _check_size(len(keys) * len(steps), len(self._place))
        return torch.unique(keys[:, None] + steps)


class _Smooth(torch.autograd.Function):
    """Sums with the taps t(d) = (−u)^p e^{−τ u}, u = (hd)², where p counts derivatives by τ along each axis."""

    @staticmethod
    def forward(
        columns: Tensor,
        tau: Tensor,
        blocks: Blocks,
        spacing: tuple[float, ...],
        reach: tuple[int, ...],
        powers: tuple[int, ...],
    ) -> Tensor:
        taps = []
        for h, R, p in zip(spacing, reach, powers, strict=True):
            u = (h * torch.arange(R + 1, dtype=torch.float64, device=columns.device)) ** 2
            taps.append(((-u) ** p * torch.exp(-tau.double() * u)).to(columns.dtype))
        with torch.autocast(columns.device.type, enabled=False):
            return blocks.sums(columns, taps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        columns, tau, *ctx.rest = inputs
        ctx.save_for_backward(columns, tau)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, tau = ctx.saved_tensors
        blocks, spacing, reach, powers = ctx.rest
        needs_columns, needs_tau = ctx.needs_input_grad[:2]
        grad_columns = grad_tau = None
        if needs_columns:
            grad_columns = _Smooth.apply(grads[0], tau, *ctx.rest)
        if needs_tau:
            grad_tau = torch.zeros_like(tau)
            for axis in range(len(powers)):
                raised = tuple(p + (a == axis) for a, p in enumerate(powers))
                derivative = _Smooth.apply(columns, tau, blocks, spacing, reach, raised)
                grad_tau = grad_tau + (grads[0] * derivative).sum().to(tau.dtype)
        return grad_columns, grad_tau, None, None, None, None


def _pass(x: Tensor, table: Tensor, matrix: Tensor) -> Tensor:
    """Sum along the leading axis of blocks (·, B, rest), which becomes the last: (n + 1, rest, B)."""
    (n, k), (_, B, rest) = table.shape, x.shape
    out = x.new_empty(n + 1, rest, B)
    out[n] = 0
    chunk = max(1, _CHUNK // (k * B * rest))
    for start in range(0, n, chunk):
        rows = table[start : start + chunk]
        gathered = x.index_select(0, rows.reshape(-1)).view(len(rows), k * B, rest)
        torch.bmm(gathered.mT, matrix.expand(len(rows), -1, -1), out=out[start : start + len(rows)])
    return out


def _toeplitz(taps: Tensor, reach: int, size: int) -> Tensor:
    """Make the matrix G, ((2r + 1) B, B), from the cells of 2r + 1 blocks to those of the middle one."""
    B, R = size, len(taps) - 1
    cells = torch.arange(B, device=taps.device)
    distance = (torch.arange(-reach * B, (reach + 1) * B, device=taps.device)[:, None] - cells).abs()
    return torch.where(distance <= R, taps[distance.clamp(max=R)], 0)


def _ravel(index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Combine coordinates into one flat index, with the last axis the fastest."""
    key = index[0]
    for i, count in zip(index[1:], shape[1:], strict=True):
        key = key * count + i
    return key


def _block_counts(extent: Sequence[int], size: int) -> list[int]:
    return [last // size + 1 for last in extent]


def _occupied(index: Sequence[Tensor], counts: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """Return the number of the block of each cell, (N,), and the sorted keys of the blocks."""
    # Consecutive cells are often in one block, so that there are fewer runs than cells to sort.
    runs, run = torch.unique_consecutive(_ravel([i // size for i in index], counts), return_inverse=True)
    keys, number = torch.unique(runs, return_inverse=True)
    return number[run], keys


def _best_size(index: Sequence[Tensor], extent: Sequence[int], reach: Sequence[int]) -> int:
    """Choose the size B of blocks with the least cost: numbers stored × taps per number."""
    costs = {}
    counts = _block_counts(extent, _SIZES[0])
    keys = torch.unique(torch.unique_consecutive(_ravel([i // _SIZES[0] for i in index], counts)))
    for size in _SIZES:
        taps = sum((2 * -(-R // size) + 1) * (size + _OVERHEAD) for R in reach)
        costs[size] = len(keys) * size ** len(index) * taps
        coordinates = torch.unravel_index(keys, counts)
        counts = _block_counts(extent, 2 * size)
        keys = torch.unique(_ravel([c // 2 for c in coordinates], counts))
    return min(costs, key=costs.__getitem__)


def _find(among: Tensor, keys: Tensor) -> Tensor:
    """Return the positions of `keys` in the sorted `among`, and its length for keys that are not in it."""
    place = torch.searchsorted(among, keys).clamp(max=len(among) - 1)
    return torch.where(among[place] == keys, place, len(among))


def _check_size(numbers: int, sites: int) -> None:
    """Check that memory stays in proportion to the number of voxels."""
    if numbers > max(2**27, 256 * sites):
        raise ValueError(
            f"`sigma` is too large for so few voxels: {sites} voxels would need {numbers:.1e} numbers. "
            "Use `GaussianKernel(kernel.points, kernel.sigma)`, or a coarser grid."
        )
