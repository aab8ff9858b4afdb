r"""The Gaussian kernel of voxels, K_ij = exp(−‖x_i − x_j‖² / 2σ²), as a separable convolution.

The convolution is truncated at a reach R_a along each axis a, in voxels. The row of a present voxel sums to at least
e^{b_i}, and all voxels beyond the reach add at most

    e^{b_max} Σ_a T_a(R_a) Π_{c≠a} S_c,        S = Σ_d t(d),   T(R) = Σ_{|d| > R} t(d),   t(d) = e^{−(hd)² / 2σ²},

so that each pass computes the reach from the tolerance and the range of the biases.
"""

import math
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.attended import Attended
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.kernels.base import Kernel
from qattn.kernels.gaussian.kernel import GaussianKernel
from qattn.kernels.voxel_blocks import Blocks

__all__ = ["VoxelKernel", "checked_spacing"]

_SINGLE = 60.0  # largest range of biases, in nats, that float32 holds, with room for the Gaussian
_FULL = 0.25  # mean fraction of occupied voxels per block above which the convolution is faster than a point cloud
_ZERO = 40.0  # bandwidths beyond which the Gaussian is 0 in float64


class VoxelKernel(Kernel):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²) between the centers of the occupied voxels of a grid; positive definite.

    Its sites are the voxels with weight above 0, in the order of the grid, with the last axis the fastest. Time and
    memory are proportional to the blocks of voxels near the shape: a thin shell in a box of 1024³ costs as much as its
    surface.

    Args:
        mask_or_weights: A grid with 1, 2 or 3 axes, dense or a sparse COO tensor: a mask that is true where a voxel is
            occupied, or weights ≥ 0, such as the fraction of each voxel that is inside, which are the default masses.
        sigma: Bandwidth σ > 0, in units of length.
        spacing: Size of a voxel in the same units: a number, or one per axis.
        method: "blocks" computes the separable convolution, best for solids; "points" is the `GaussianKernel` of the
            centers, best for thin shells, whose blocks are nearly empty. "auto" depends on how full the blocks are.
        tol: Largest acceptable error of lse; see `error`.

    Examples:
        >>> kernel = VoxelKernel(torch.ones(8, 8, 8), sigma=0.2, spacing=0.1)
        >>> kernel
        VoxelKernel(512 of 8 × 8 × 8 voxels, sigma=0.2, spacing=0.1, method='blocks')
        >>> bool(diffusion(kernel).marginal_error < 1e-3)
        True
    """

    def __init__(
        self,
        mask_or_weights: ArrayLike,
        sigma: ArrayLike,
        spacing: ArrayLike = 1.0,
        *,
        method: Literal["auto", "blocks", "points"] = "auto",
        tol: float = 1e-3,
    ) -> None:
        _checks.one_of("method", method, ("auto", "blocks", "points"))
        _checks.positive("`tol`", tol)
        self._cells, self._weights, self._grid = _occupied("mask_or_weights", mask_or_weights)
        self._spacing = checked_spacing(spacing, len(self._grid))
        dtype = torch.float64 if self._weights is not None and self._weights.dtype == torch.float64 else torch.float32
        self._sigma = _checks.one_bandwidth(sigma, dtype, self._cells.device)
        self._tol = tol
        reach = self._reach([count - 1 for count in self._grid], 0.0)
        self._blocks = Blocks(torch.unravel_index(self._cells, self._grid), reach)
        self._method = method

    def __repr__(self) -> str:
        grid = " × ".join(map(str, self._grid))
        is_even = len(set(self._spacing)) == 1
        spacing = f"{self._spacing[0]:g}" if is_even else f"({', '.join(f'{h:g}' for h in self._spacing)})"
        options = f"sigma={float(self._sigma):g}, spacing={spacing}, method={self.method!r}"
        return f"VoxelKernel({len(self._cells)} of {grid} voxels, {options})"

    def __str__(self) -> str:
        if self.method == "points":
            return f"{self!r}\n  {self._cloud}"
        size, reach = self._blocks.size, self._reach(self._blocks.extent, 0.0)
        return (
            f"{self!r}\n  {len(self._blocks)} blocks of {' × '.join([str(size)] * len(reach))} voxels, "
            f"reach {' × '.join(map(str, reach))}"
        )

    @property
    def index(self) -> Tensor:
        """Indices of the sites in the grid, shape (N, axes)."""
        return torch.stack(torch.unravel_index(self._cells, self._grid), dim=-1)

    @property
    def points(self) -> Tensor:
        """Centers x of the sites in units of length, their indices times the spacing, shape (N, axes)."""
        return (self.index * self.index.new_tensor(self._spacing, dtype=torch.float64)).to(self.dtype)

    @property
    def sigma(self) -> Tensor:
        """Bandwidth σ, a scalar tensor."""
        return self._sigma

    @property
    def spacing(self) -> tuple[float, ...]:
        """Size of a voxel along each axis."""
        return self._spacing

    @property
    def method(self) -> Literal["blocks", "points"]:
        """The method in use, "blocks" or "points"."""
        if self._method != "auto":
            return self._method
        return "blocks" if len(self._cells) >= _FULL * len(self._blocks) * self._blocks.cells else "points"

    @property
    def tol(self) -> float:
        """Largest acceptable error of lse."""
        return self._tol

    @property
    def mass(self) -> Tensor | None:
        """Weights divided by their sum, shape (N,); None for a mask."""
        return None if self._weights is None else self._weights / self._weights.sum()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cells), len(self._cells)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._sigma,) if self._weights is None else (self._sigma, self._weights)

    def replace(self, *tensors: Tensor) -> "VoxelKernel":
        kernel = self._with(_sigma=tensors[0], _weights=None if self._weights is None else tensors[1])
        if kernel.device != self.device:
            kernel._cells, kernel._blocks = self._cells.to(kernel.device), self._blocks.to(kernel.device)
        if "_cloud" in vars(self):
            kernel._cloud = self._cloud.replace(self._cloud.points.to(kernel._sigma), kernel._sigma)
        return kernel

    @cached_property
    def _cloud(self) -> GaussianKernel:
        """The kernel of the centers."""
        return GaussianKernel(self.points, self._sigma, tol=self._tol)

    def from_grid(self, grid: ArrayLike) -> TensorOrArray:
        """Return the values of a grid (*grid, …) at the sites, a tensor or array of shape (N, …), as `grid` is."""
        values = _on_grid(grid, self._grid, self.device)
        sites = values.reshape(math.prod(self._grid), *values.shape[len(self._grid) :])[self._cells]
        return like_input(sites, grid)

    def to_grid(self, signal: ArrayLike, fill: float = 0.0) -> TensorOrArray:
        """Place a signal (N,) or (N, C) on the grid, (*grid,) or (*grid, C), if that fits a gigabyte.

        Args:
            signal: One value, or C values, per site.
            fill: Value of all other voxels.

        Returns:
            A tensor or array, as `signal` is.
        """
        values = _checks.signal(signal, self.shape, self.device)
        shape = _shape_on_grid(values, self._grid)
        cells = values.new_full((math.prod(self._grid), *values.shape[1:]), fill)
        return like_input(cells.index_copy(0, self._cells, values).reshape(shape), signal)

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        if self.method == "points":
            return self._cloud.attend(bias, value, all_rows=all_rows)
        top, span = _range(bias.detach())
        _check_range(span)
        reach = self._reach(self._blocks.extent, span)
        dtype = self.dtype if span <= _SINGLE else torch.float64
        weights = torch.exp(bias.to(dtype) - top)  # (*batch, N)
        total = self._smooth(weights[..., None], reach)[..., 0]
        has_weight = total > 0
        lse = top + torch.where(has_weight, torch.log(torch.where(has_weight, total, 1)), -torch.inf)
        out = None
        if value is not None:
            sums = self._smooth(weights[..., None] * value, reach)
            out = (sums / torch.where(has_weight, total, 1)[..., None]).to(value.dtype)
        if all_rows and len(rows := _unsure_rows(bias.detach(), total.detach(), span)):
            exact = self._attend_far(rows, bias, value)
            lse = lse.index_copy(-1, rows, exact.lse.to(lse))
            out = None if out is None or exact.out is None else out.index_copy(-2, rows, exact.out.to(out))
        return Attended(out, lse.to(self.dtype))

    def _smooth(self, columns: Tensor, reach: list[int]) -> Tensor:
        """Apply K to columns (*batch, N, C)."""
        rows = columns.movedim(-2, 0)  # (N, *batch, C)
        scale = float(self._sigma.detach())
        tau = 0.5 * (scale / self._sigma) ** 2  # ½ in units of the bandwidth, with a gradient by σ
        spacing = [h / scale for h in self._spacing]
        flat = rows.reshape(len(rows), -1)
        return self._blocks.smooth(flat, tau, spacing, reach).reshape(rows.shape).movedim(0, -2)

    def _reach(self, extent: list[int], span: float) -> list[int]:
        """Compute the reach of the sums along each axis, at most to the end of the grid, for a range of biases."""
        sigma = float(self._sigma.detach())
        tails = []
        for h, last in zip(self._spacing, extent, strict=True):
            last = min(last, math.ceil(_ZERO * sigma / h))
            taps = torch.exp(-0.5 * (h / sigma * torch.arange(last + 1, dtype=torch.float64)) ** 2)
            tails.append(2 * taps.flip(0).cumsum(0).flip(0))  # Σ_{|d| ≥ R} t(d) for R = 0, 1, …
        sums = [float(tail[0]) - 1 for tail in tails]
        limit = self._tol * math.exp(-span) / len(tails)
        return [int((tail[1:] * math.prod(sums) / S > limit).sum()) for tail, S in zip(tails, sums, strict=True)]

    def _attend_far(self, rows: Tensor, bias: Tensor, value: Tensor | None) -> Attended:
        """A few rows by their points, at any distance from the sites that are present."""
        # In float64: places rounded to float32 would not tell one site from another, so far away.
        points = self.index * self.index.new_tensor(self._spacing, dtype=torch.float64)
        points = points.expand(*bias.shape[:-1], -1, -1)
        kernel = GaussianKernel(points, self._sigma.double(), tol=self._tol)
        return kernel.at(points[..., rows, :]).attend(bias.double(), value)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        spacing = torch.tensor(self._spacing, dtype=torch.float64)
        points = self.index.cpu() * (spacing / self._sigma.detach().cpu().double())
        bias = bias.detach().cpu().double()
        return attend_batched(Dispatch("reference"), points[rows.cpu()], points, None, bias, tol=1.0).lse


def _range(bias: Tensor) -> tuple[Tensor, float]:
    """Return the largest bias of each item, (*batch, 1), 0 if all are −inf, and the largest range of finite biases."""
    largest, least = bias.amax(-1, keepdim=True), bias.amin(-1, keepdim=True)
    if (least == -torch.inf).any():
        least = torch.where(bias == -torch.inf, torch.inf, bias).amin(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    return largest, max([0.0, *(largest - least).flatten().tolist()])


def _unsure_rows(bias: Tensor, total: Tensor, span: float) -> Tensor:
    """Return the indices (n,) of absent sites with smaller sums than present ones, for which the reach is too short."""
    is_absent = bias == -torch.inf
    if not is_absent.any():
        return is_absent.new_zeros(0, dtype=torch.int64)
    is_unsure = is_absent & ~is_absent.all(-1, keepdim=True) & (total < math.exp(-span))
    return is_unsure.reshape(-1, is_unsure.shape[-1]).any(0).nonzero()[:, 0]


def _occupied(name: str, mask_or_weights: ArrayLike) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Return the flat indices (N,) of occupied cells, their weights (N,), or None for a mask, and the grid's shape."""
    grid = _checks.as_tensor(name, mask_or_weights)
    shape = tuple(grid.shape)
    if not 1 <= len(shape) <= 3:
        raise ValueError(
            f"`{name}` should be a grid with 1, 2 or 3 axes; got shape {shape}. Make a kernel for each grid of a batch."
        )
    is_mask, cells = grid.dtype == torch.bool, None
    if grid.layout != torch.strided:
        entries = (grid.to(torch.uint8) if is_mask else grid).to_sparse_coo().coalesce()  # adds up repeated entries
        if entries.dense_dim():
            raise ValueError(f"`{name}` should be sparse along all its axes; {entries.dense_dim()} of them are dense.")
        values, cells = entries.values(), entries.indices()[0]
        for i, count in zip(entries.indices()[1:], shape[1:], strict=True):
            cells = cells * count + i
    else:
        values = grid.reshape(-1)
    if not is_mask:
        values = _checks.floating(name, values)
        _checks.finite(name, values, "Set them to 0 to leave those voxels out.")
        if (values < 0).any():
            raise ValueError(
                f"`{name}` should not be negative; {int((values < 0).sum())} of its {len(values)} weights are. "
                f"Use `{name}.clamp(min=0)`, or for a signed distance the mask `distance < 0`."
            )
    occupied = (values > 0).nonzero()[:, 0]
    if len(occupied) == 0:
        raise ValueError(f"`{name}` should hold at least one occupied voxel; all of shape {shape} are empty.")
    weights = None if is_mask else values[occupied].to(torch.promote_types(values.dtype, torch.float32))
    return occupied if cells is None else cells[occupied], weights, shape


def _check_range(span: float) -> None:
    """Check that sums of e^b can be computed in float64."""
    if span > 650:
        raise ValueError(
            f"The biases of the voxels that are present should be within 650 nats of one another; got {span:.0f}. "
            "Give the lightest of them mass 0, or use `GaussianKernel(kernel.points, kernel.sigma)`."
        )


def _on_grid(numbers: ArrayLike, grid: tuple[int, ...], device: torch.device) -> Tensor:
    """Convert to a tensor of values (*grid, …)."""
    tensor = _checks.as_tensor("grid", numbers)
    if tuple(tensor.shape[: len(grid)]) != grid:
        expected = ", ".join(map(str, grid))
        raise ValueError(
            f"`grid` should have shape ({expected}, …), like the grid of the kernel; got {_checks.shape_of(tensor)}."
        )
    if tensor.device != device:
        raise ValueError(f"`grid` should be on {device}, where the kernel is; got {tensor.device}.")
    return tensor


def _shape_on_grid(values: Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (*grid,) or (*grid, C) of a signal (N,) or (N, C) on a grid, if it fits a gigabyte."""
    if values.ndim > 2:
        raise ValueError(f"`signal` should have shape (N,) or (N, C); got {_checks.shape_of(values)}.")
    shape = (*grid, *values.shape[1:])
    size = math.prod(shape) * values.dtype.itemsize
    if size > 2**30:
        raise ValueError(
            f"`to_grid` would make a grid of shape {shape}, {size / 2**30:.1f} GB. "
            "Place the signal with `kernel.index` in the part of the grid that you need."
        )
    return shape


def checked_spacing(numbers: ArrayLike, axes: int) -> tuple[float, ...]:
    """Convert a spacing to one number per axis."""
    tensor = _checks.as_tensor("spacing", numbers).double()
    if tensor.ndim > 1 or (tensor.ndim == 1 and len(tensor) != axes):
        raise ValueError(
            f"`spacing` should be a number, or one for each of the {axes} axes of the grid; "
            f"got shape {_checks.shape_of(tensor)}."
        )
    _checks.positive("`spacing`", tensor)
    return tuple(tensor.expand(axes).tolist())
