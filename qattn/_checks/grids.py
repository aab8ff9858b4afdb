"""Voxels."""

import math
from typing import Any

import torch
from torch import Tensor

from qattn._checks.matrices import is_sparse
from qattn._checks.numbers import as_tensor, finite, floating, positive, shape_of

__all__ = ["blocks_are_few", "on_grid", "range_of_biases", "shape_on_grid", "spacing", "voxels"]


def voxels(name: str, given: Any) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """The occupied cells (N,) of a grid as flat numbers, their weights (N,) or None for a mask, and its shape."""
    grid = as_tensor(name, given)
    shape = tuple(grid.shape)
    if not 1 <= len(shape) <= 3:
        raise ValueError(
            f"`{name}` should be a grid with 1, 2 or 3 axes; got shape {shape}. Make a kernel for each grid of a batch."
        )
    is_mask, cells = grid.dtype == torch.bool, None
    if is_sparse(grid):
        entries = (grid.to(torch.uint8) if is_mask else grid).to_sparse_coo().coalesce()  # repeated entries add up
        if entries.dense_dim():
            raise ValueError(f"`{name}` should be sparse along all its axes; {entries.dense_dim()} of them are dense.")
        values, cells = entries.values(), entries.indices()[0]
        for i, count in zip(entries.indices()[1:], shape[1:], strict=True):
            cells = cells * count + i
    else:
        values = grid.reshape(-1)
    if not is_mask:
        values = floating(name, values)
        finite(name, values, "Set them to 0 to leave those voxels out.")
        if (values < 0).any():
            raise ValueError(
                f"`{name}` should not be negative; {int((values < 0).sum())} of its {len(values)} weights are. "
                f"Take `{name}.clamp(min=0)`, or for a signed distance the mask `distance < 0`."
            )
    occupied = (values > 0).nonzero()[:, 0]
    if len(occupied) == 0:
        raise ValueError(f"`{name}` should hold at least one occupied voxel; all of shape {shape} are empty.")
    weights = None if is_mask else values[occupied].to(torch.promote_types(values.dtype, torch.float32))
    return occupied if cells is None else cells[occupied], weights, shape


def spacing(numbers: Any, axes: int) -> tuple[float, ...]:
    """The size of a voxel along each axis."""
    tensor = as_tensor("spacing", numbers).double()
    if tensor.ndim > 1 or (tensor.ndim == 1 and len(tensor) != axes):
        raise ValueError(
            f"`spacing` should be a number, or one for each of the {axes} axes of the grid; got {shape_of(tensor)}."
        )
    positive("`spacing`", tensor)
    return tuple(tensor.expand(axes).tolist())


def range_of_biases(span: float) -> None:
    """Checks that sums of e^b can be formed in float64."""
    if span > 650:
        raise ValueError(
            f"The biases of the voxels that are present should be within 650 nats of one another; got {span:.0f}. "
            "Give the lightest of them mass 0, or take `GaussianKernel(kernel.points, kernel.sigma)`."
        )


def blocks_are_few(numbers: int, sites: int) -> None:
    """Checks that memory stays in proportion to the voxels."""
    if numbers > max(2**27, 256 * sites):
        raise ValueError(
            f"With this bandwidth {sites} voxels would need {numbers:.1e} numbers, as its reach is long for so few. "
            "Take `GaussianKernel(kernel.points, kernel.sigma)`, or a coarser grid."
        )


def on_grid(numbers: Any, grid: tuple[int, ...], device: torch.device) -> Tensor:
    """Values (*grid, …)."""
    tensor = as_tensor("grid", numbers)
    if tuple(tensor.shape[: len(grid)]) != grid:
        expected = ", ".join(map(str, grid))
        raise ValueError(f"`grid` should have shape ({expected}, …), as that of the kernel; got {shape_of(tensor)}.")
    if tensor.device != device:
        raise ValueError(f"`grid` should be on {device}, where the kernel is; got {tensor.device}.")
    return tensor


def shape_on_grid(values: Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (*grid,) or (*grid, C) of a signal (N,) or (N, C) on a grid, if that is not too much."""
    if values.ndim > 2:
        raise ValueError(f"`signal` should have shape (N,) or (N, C); got {shape_of(values)}.")
    shape = (*grid, *values.shape[1:])
    size = math.prod(shape) * values.dtype.itemsize
    if size > 2**30:
        raise ValueError(
            f"`to_grid` would make a grid of shape {shape}, {size / 2**30:.1f} GB. "
            "Place the signal yourself with `kernel.index`, in the part of the grid that you need."
        )
    return shape
