r"""The Gaussian kernel of the voxels of a shape: K_ij = exp(−‖x_i − x_j‖² / 2σ²), one axis after the other.

With weights e^{b−top}, the row sums are a separable convolution of them, truncated where it does not matter. A row of a
voxel that is present sums to at least e^{b_i}, and what lies beyond the reach R_a of some axis adds at most

    e^{b_max} Σ_a T_a(R_a) Π_{c≠a} S_c,        S = Σ_d t(d),   T(R) = Σ_{|d| > R} t(d),   t(d) = e^{−(hd)² / 2σ²},

so that reaches follow from a tolerance and from the range of the biases, anew in each pass.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.attention import attend
from qattn.kernels.base import Kernel
from qattn.kernels.blocks import Blocks
from qattn.kernels.gaussian import GaussianKernel

__all__ = ["VoxelKernel"]

_SINGLE = 60.0  # the range of biases, in nats, that float32 holds with room for the Gaussian
_FULL = 0.25  # of a block, on average, for which the convolution is faster than a cloud
_ZERO = 40.0  # bandwidths beyond which the Gaussian is 0 in float64


class VoxelKernel(Kernel):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²) between the centres of the occupied voxels of a grid; positive definite.

    Its sites are the voxels of weight above 0, in the order of the grid, the last axis the fastest. Time and memory are
    those of blocks of voxels near the shape, so that a thin shell in a box of 1024³ costs what its surface does.

    Args:
        mask_or_weights: A grid with 1, 2 or 3 axes, a tensor or an array: true where a voxel is occupied, or weights
            ≥ 0, as fractions of voxels that are inside, which are then the masses; or a sparse COO tensor of either.
        sigma: The bandwidth σ > 0, in units of the world.
        spacing: The size of a voxel in those units, a number or one for each axis.
        method: "blocks" is the separable convolution, best for solids; "points" the `GaussianKernel` of the centres,
            best for thin shells, whose blocks are nearly empty. "auto" goes by how full the blocks are.
        tol: The largest error of lse that is acceptable; see `error`.

    Example:
        >>> kernel = VoxelKernel(torch.ones(8, 8, 8), sigma=0.2, spacing=0.1)
        >>> kernel
        VoxelKernel(512 of 8 × 8 × 8 voxels, sigma=0.2, spacing=0.1, method='blocks')
        >>> bool(diffusion(kernel).marginal_error < 1e-3)
        True
    """

    def __init__(
        self, mask_or_weights: Any, sigma: Any, spacing: Any = 1.0, *, method: str = "auto", tol: float = 1e-3
    ) -> None:
        _checks.one_of("method", method, ("auto", "blocks", "points"))
        _checks.positive("`tol`", tol)
        self._cells, self._weights, self._grid = _checks.voxels("mask_or_weights", mask_or_weights)
        self._spacing = _checks.spacing(spacing, len(self._grid))
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
        how = f"sigma={float(self._sigma):g}, spacing={spacing}, method={self.method!r}"
        return f"VoxelKernel({len(self._cells)} of {grid} voxels, {how})"

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
        """The places of the sites in the grid, shape (N, axes)."""
        return torch.stack(torch.unravel_index(self._cells, self._grid), dim=-1)

    @property
    def points(self) -> Tensor:
        """The centres x of the sites in units of the world, their index times the spacing, shape (N, axes)."""
        return (self.index * self.index.new_tensor(self._spacing, dtype=torch.float64)).to(self.dtype)

    @property
    def sigma(self) -> Tensor:
        """The bandwidth σ, a tensor without axes."""
        return self._sigma

    @property
    def spacing(self) -> tuple[float, ...]:
        """The size of a voxel along each axis."""
        return self._spacing

    @property
    def method(self) -> str:
        """How it is computed, "blocks" or "points"."""
        if self._method != "auto":
            return self._method
        return "blocks" if len(self._cells) >= _FULL * len(self._blocks) * self._blocks.cells else "points"

    @property
    def tol(self) -> float:
        """The largest error of lse that is acceptable."""
        return self._tol

    @property
    def mass(self) -> Tensor | None:
        """The weights over their sum, shape (N,); None for a mask."""
        return None if self._weights is None else self._weights / self._weights.sum()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cells), len(self._cells)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._sigma,) if self._weights is None else (self._sigma, self._weights)

    def replace(self, *tensors: Tensor) -> "VoxelKernel":
        kernel = object.__new__(VoxelKernel)
        kernel.__dict__.update(self.__dict__)
        kernel._sigma = tensors[0]
        kernel._weights = None if self._weights is None else tensors[1]
        if kernel.device != self.device:
            kernel._cells, kernel._blocks = self._cells.to(kernel.device), self._blocks.to(kernel.device)
        if "_cloud" in vars(self):
            kernel._cloud = self._cloud.replace(self._cloud.points.to(kernel._sigma), kernel._sigma)
        return kernel

    @cached_property
    def _cloud(self) -> GaussianKernel:
        """The kernel of the centres."""
        return GaussianKernel(self.points, self._sigma, tol=self._tol)

    def from_grid(self, grid: Any) -> Any:
        """The values of a grid (*grid, …) at the sites, shape (N, …); arrays come back as arrays."""
        values = _checks.on_grid(grid, self._grid, self.device)
        found = values.reshape(math.prod(self._grid), *values.shape[len(self._grid) :])[self._cells]
        return found if isinstance(grid, Tensor) else found.numpy(force=True)

    def to_grid(self, signal: Any, fill: float = 0.0) -> Any:
        """A signal (N,) or (N, C) on the grid, (*grid,) or (*grid, C), `fill` elsewhere, if it fits a gigabyte."""
        values = _checks.signal(signal, self.shape, self.device)
        shape = _checks.shape_on_grid(values, self._grid)
        whole = values.new_full((math.prod(self._grid), *values.shape[1:]), fill)
        whole = whole.index_copy(0, self._cells, values).reshape(shape)
        return whole if isinstance(signal, Tensor) else whole.numpy(force=True)

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        if self.method == "points":
            return self._cloud.attend(bias, value)
        top, span = _range(bias.detach())
        _checks.range_of_biases(span)
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
        rows = _unsure_rows(bias.detach(), total.detach(), span)
        if len(rows):
            exact = self._attend_far(rows, bias, value)
            lse = lse.index_copy(-1, rows, exact.lse.to(dtype))
            out = None if out is None or exact.out is None else out.index_copy(-2, rows, exact.out)
        return Attended(out, lse.to(self.dtype))

    def _smooth(self, columns: Tensor, reach: list[int]) -> Tensor:
        """K applied to columns (*batch, N, C)."""
        first = columns.movedim(-2, 0)  # (N, *batch, C)
        scale = float(self._sigma.detach())
        tau = 0.5 * (scale / self._sigma) ** 2  # ½, in units of a bandwidth; it carries the gradient
        spacing = [h / scale for h in self._spacing]
        flat = first.reshape(len(first), -1)
        return self._blocks.smooth(flat, tau, spacing, reach).reshape(first.shape).movedim(0, -2)

    def _reach(self, extent: list[int], span: float) -> list[int]:
        """How far along each axis sums should go, for biases within a range: to the end of the grid at most."""
        sigma = float(self._sigma.detach())
        tails = []
        for h, last in zip(self._spacing, extent, strict=True):
            last = min(last, math.ceil(_ZERO * sigma / h))
            taps = torch.exp(-0.5 * (h / sigma * torch.arange(last + 1, dtype=torch.float64)) ** 2)
            tails.append(2 * taps.flip(0).cumsum(0).flip(0))  # Σ_{|d| ≥ R} t(d), R = 0, 1, …; the last is not 0
        sums = [float(tail[0]) - 1 for tail in tails]
        goal = self._tol * math.exp(-span) / len(tails)
        return [int((tail[1:] * math.prod(sums) / S > goal).sum()) for tail, S in zip(tails, sums, strict=True)]

    def _attend_far(self, rows: Tensor, bias: Tensor, value: Tensor | None) -> Attended:
        """A few rows by their points, at any distance from the sites that are present."""
        points = self.points
        kernel = GaussianKernel(points.expand(*bias.shape[:-1], -1, -1), self._sigma, tol=self._tol)
        return kernel.at(points[rows].expand(*bias.shape[:-1], -1, -1)).attend(bias, value)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        spacing = torch.tensor(self._spacing, dtype=torch.float64)
        points = self.index.cpu() * (spacing / self._sigma.detach().cpu().double())
        return attend(points[rows.cpu()], points, bias=bias.detach().cpu().double(), backend="reference").lse


def _range(bias: Tensor) -> tuple[Tensor, float]:
    """The largest bias of each item (*batch, 1), 0 if there is none, and the widest range of those that are finite."""
    top, low = bias.amax(-1, keepdim=True), bias.amin(-1, keepdim=True)
    if (low == -torch.inf).any():
        low = torch.where(bias == -torch.inf, torch.inf, bias).amin(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    return top, max([0.0, *(top - low).flatten().tolist()])


def _unsure_rows(bias: Tensor, total: Tensor, span: float) -> Tensor:
    """The rows (n,) of absent sites that sum to less than any of a present one: the reach promises them nothing."""
    is_absent = bias == -torch.inf
    if not is_absent.any():
        return is_absent.new_zeros(0, dtype=torch.int64)
    is_unsure = is_absent & ~is_absent.all(-1, keepdim=True) & (total < math.exp(-span))
    return is_unsure.reshape(-1, is_unsure.shape[-1]).any(0).nonzero()[:, 0]
