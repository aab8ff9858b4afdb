r"""A point transformer whose attention is a diffusion: a U-Net whose levels get coarser and keep the measure."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qattn import _checks
from qattn._types import ArrayLike
from qattn.kernels import GaussianKernel
from qattn.mass import mass_of
from qattn.nn.cells import Cells, merged
from qattn.nn.hub import HubMixin
from qattn.nn.layouts import Features, PaddedClouds, check_channels
from qattn.nn.point_block import Extension, PointBlock, ResidualMLP
from qattn.operators.scaling import shares
from qattn.operators.sinkhorn import Solver
from qattn.ranks import ALONE

__all__ = ["QPointTransformer"]


class _Sizes(NamedTuple):
    """Numbers of each level, from the finest on."""

    widths: tuple[int, ...]
    num_blocks: tuple[int, ...]
    num_heads: tuple[int, ...]


_PRESETS = {
    "tiny": _Sizes((32, 64, 128), (1, 1, 1), (4, 8, 16)),
    "small": _Sizes((48, 96, 192), (1, 2, 2), (6, 12, 24)),
    "base": _Sizes((64, 128, 256, 384), (1, 2, 4, 2), (4, 8, 16, 24)),
}


class _Level(NamedTuple):
    """Points of a level, in units of the finest cells: positions (B, N, d), normals (B, N, d) and masses (B, N)."""

    points: Tensor
    normals: Tensor | None
    mass: Tensor

    def merged(self, edge: float) -> tuple[Cells, "_Level"]:
        """Merge the points by cells of a size."""
        cells = merged(self.points, self.mass, edge)
        return cells, _Level(cells.points, None if self.normals is None else cells.mean(self.normals), cells.mass)


class QPointTransformer(
    nn.Module,
    HubMixin,
    library_name="qattn",
    tags=["point-cloud", "diffusion-operators"],
    coders={Solver: (asdict, lambda options: Solver(**options))},
):
    r"""A network for segmentation at points, and for classification and embedding of clouds, with attention by Q.

    On the way down, the points of each cell of a grid become one, whose mass is their sum and whose position and
    features are means by mass. Cells of the first level have the edge `spacing`; those of each further level are twice
    as large. So all levels see the same measure, and attention on them is the same diffusion, coarser. Its kernel
    contains positions and learned content; gradients of features in space come from the same pass,

        ∇(Qf) = (Q(f ⊗ x) − Qf ⊗ Qx) / σ².

    On the way up, each point attends to the points of the coarser level, by a Gaussian whose rows sum to one.

    Lengths are in units of `spacing` and do not depend on the sampling: with masses, clouds of more, fewer or uneven
    points approximate the same operators. Features should contain whatever the outputs may depend on, such as the
    coordinates.

    Args:
        in_channels: Number of channels of the input features.
        out_channels: Number of channels of the outputs.
        spacing: Edge of the cells of the first level, in the unit of the points: two or three distances of neighbors.
        preset: Sizes of the network: "tiny", "small" or "base".
        widths: Number of channels on each level; by default that of the preset, as the next two.
        num_blocks: Number of blocks on each level.
        num_heads: Number of heads on each level; they divide its number of channels.
        content_dim: Number of channels per head of the content that the kernel contains; with 0 attention depends on
            positions (and normals) alone.
        gradient_dim: Number of channels per head whose gradients are used, with the mean position of each row; 0 for
            neither.
        coord_dim: Dimension d of the points.
        normals: Whether the points are (N, 2 d), positions and unit normals. The kernel then contains both.
        output: "points" for outputs at the points; "mean" for one output per cloud, from the mean by mass of features
            on the last level.
        sigma_range: Least and largest initial bandwidth on each level, in units of its cells.
        mlp_ratio: Width of the hidden layers of MLPs, in units of the number of channels.
        dropout: Fraction of channels that are dropped.
        drop_path: Fraction of clouds for which the last block is dropped; it grows linearly from the first block on.
        recompute: Whether to recompute blocks, pools and extensions in the backward pass, which saves memory.
        solver: Options of the Sinkhorn iteration and of its derivative.
        **diffusion: Further arguments of `QDiffusion`, such as `normalization="row"` for softmax attention.

    Examples:
        >>> network = QPointTransformer(3, 13, spacing=0.2, preset="tiny")
        >>> points = torch.rand(2, 500, 3)
        >>> network(points, points).shape
        torch.Size([2, 500, 13])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        spacing: float,
        preset: Literal["tiny", "small", "base"] = "small",
        widths: Sequence[int] | None = None,
        num_blocks: Sequence[int] | None = None,
        num_heads: Sequence[int] | None = None,
        content_dim: int = 8,
        gradient_dim: int = 8,
        coord_dim: int = 3,
        normals: bool = False,
        output: Literal["points", "mean"] = "points",
        sigma_range: tuple[float, float] = (1.0, 3.0),
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        recompute: bool = False,
        solver: Solver = Solver(),  # noqa: B008 (it is frozen)
        **diffusion: Any,
    ) -> None:
        super().__init__()
        _checks.positive("`spacing`", spacing)
        _checks.one_of("preset", preset, tuple(_PRESETS))
        _checks.one_of("output", output, ("points", "mean"))
        self.in_channels, self.spacing, self.output, self.recompute = in_channels, float(spacing), output, recompute
        self.coord_dim, self.normals = _checks.integer("coord_dim", coord_dim, 1), normals
        _checks.integer("content_dim", content_dim, 0)
        _checks.integer("gradient_dim", gradient_dim, 0)
        sizes = _checked_sizes(preset, widths, num_blocks, num_heads, gradient_dim)
        if diffusion.get("group") is not None:
            raise ValueError("`group` is not an option of `QPointTransformer`: cells are merged within a process.")
        if not 0 <= drop_path < 1:
            raise ValueError(f"`drop_path` should be a fraction from 0 to below 1; got {drop_path}.")
        count = sum(sizes.num_blocks)
        rates = iter([drop_path * n / max(1, count - 1) for n in range(count)])
        options = {"sigma_range": sigma_range, "solver": solver, **diffusion}
        options |= {"coord_dim": coord_dim, "content_dim": content_dim, "gradient_dim": gradient_dim}
        options |= {"normals": normals, "mlp_ratio": mlp_ratio, "dropout": dropout}
        pairs = list(pairwise((sizes.widths[0], *sizes.widths)))  # widths of the points, and of all levels
        geometry = coord_dim * (2 if normals else 1)
        self.embed = nn.Linear(in_channels, sizes.widths[0])
        self.pools = nn.ModuleList(_Pool(fine, coarse, geometry) for fine, coarse in pairs)
        self.levels = nn.ModuleList(
            nn.ModuleList(PointBlock(width, heads, drop_path=next(rates), **options) for _ in range(count))
            for width, count, heads in zip(*sizes, strict=True)
        )
        width = sizes.widths[-1]
        if output == "points":
            width = sizes.widths[0]
            self.extensions = nn.ModuleList(Extension(coarse, fine) for fine, coarse in pairs)
            self.mlps = nn.ModuleList(ResidualMLP(fine, mlp_ratio, dropout, 0.0) for fine, _ in pairs)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out_channels))

    def forward(
        self,
        features: Features,
        points: Tensor | None = None,
        mass: Tensor | None = None,
        *,
        offset: ArrayLike | None = None,
        batch: ArrayLike | None = None,
    ) -> Features:
        """Compute outputs (B, N, out_channels), or (B, out_channels) for "mean", in the layout of the features.

        Args:
            features: Features in any layout; see `QAttention.forward`.
            points: Positions, or positions and normals, in the same layout.
            mass: Masses, in the same layout, 0 for padding; equal within each cloud by default. Points without mass get
                outputs too, and do not influence others.
            offset: End of each cloud in a packed layout.
            batch: Index of the cloud of each point in a packed layout.
        """
        clouds = PaddedClouds.of(features, points, mass, offset, batch, self, ALONE)
        check_channels("features", clouds.features, self.in_channels)
        check_channels("points", clouds.points, self.coord_dim * (2 if self.normals else 1))
        level, x, edge = self._first_level(clouds), self.embed(clouds.features), 1.0
        way: list[tuple[Tensor, _Level]] = []
        for pool, blocks in zip(self.pools, self.levels, strict=True):
            way.append((x, level))
            cells, coarse = level.merged(edge)
            x = self._called(pool, x, level, cells, edge)
            x, level, edge = self._through(blocks, x, coarse, edge), coarse, 2 * edge  # type: ignore[arg-type]
        if self.output == "mean":
            return clouds.restore(self.last((level.mass[..., None].to(x) * x).sum(1)))
        for extension, mlp in zip(reversed(self.extensions), reversed(self.mlps), strict=True):
            edge, (skip, fine) = edge / 2, way.pop()
            x = self._called(extension, x, level.points / edge, level.mass, fine.points / edge)
            x, level = self._called(mlp, skip + x), fine
        return clouds.restore(self.last(x))

    def _first_level(self, clouds: PaddedClouds) -> _Level:
        """Return the points, relative to an origin near them that leaves the cells of all levels in place."""
        x = clouds.points.to(torch.promote_types(clouds.points.dtype, torch.float32))
        positions, normals = x.split([self.coord_dim, x.shape[-1] - self.coord_dim], dim=-1)
        kernel = GaussianKernel(positions, self.spacing)
        mass = shares(mass_of(clouds.mass, kernel), ALONE)
        period = self.spacing * 2.0 ** (len(self.levels) - 1)
        center = (mass[..., None] * positions).sum(-2, keepdim=True).detach().double()
        origin = period * torch.round(center / period)  # (B, 1, d)
        positions = ((positions.double() - origin) / self.spacing).to(positions.dtype)
        return _Level(positions, normals if self.normals else None, mass)

    def _through(self, blocks: nn.ModuleList, x: Tensor, level: _Level, edge: float) -> Tensor:
        """Apply the blocks of a level, each of which starts from the potentials of the one before."""
        points, q = level.points / edge, None
        for block in blocks:
            x, q = self._called(block, x, points, level.mass, level.normals, q)
        return x

    def _called(self, module: nn.Module, *inputs: Any) -> Any:
        """Call a module, which is called again in the backward pass if `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)


class _Pool(nn.Module):
    """Means over cells of new features, to which each point contributes with its position in the cell."""

    def __init__(self, width: int, out_width: int, geometry: int) -> None:
        super().__init__()
        self.norm, self.linear, self.activation = nn.LayerNorm(width), nn.Linear(width + geometry, out_width), nn.GELU()

    def forward(self, x: Tensor, level: _Level, cells: Cells, edge: float) -> Tensor:
        places = (level.points - cells.at_points(cells.points)) / edge
        geometry = [places] if level.normals is None else [places, level.normals]
        x = torch.cat([self.norm(x), *(part.to(x) for part in geometry)], dim=-1)
        return cells.mean(self.activation(self.linear(x)))


def _checked_sizes(
    preset: str,
    widths: Sequence[int] | None,
    num_blocks: Sequence[int] | None,
    num_heads: Sequence[int] | None,
    gradient_dim: int,
) -> _Sizes:
    """Return the sizes of a preset, or those given."""
    given = zip(_Sizes._fields, (widths, num_blocks, num_heads), _PRESETS[preset], strict=True)
    sizes = _Sizes(
        *(
            default if numbers is None else tuple(_checks.integer(name, number, 1) for number in numbers)
            for name, numbers, default in given
        )
    )
    if len(set(map(len, sizes))) > 1 or not sizes.widths:
        raise ValueError(
            f"`widths`, `num_blocks` and `num_heads` should have one number per level; got {sizes.widths}, "
            f"{sizes.num_blocks} and {sizes.num_heads}. Those not given are of preset={preset!r}."
        )
    for width, heads in zip(sizes.widths, sizes.num_heads, strict=True):
        if width % heads:
            raise ValueError(f"`widths` should be multiples of `num_heads`; got {sizes.widths} and {sizes.num_heads}.")
        if gradient_dim > width // heads:
            raise ValueError(
                f"`gradient_dim` should be at most the number of channels per head; got {gradient_dim}, with widths "
                f"{sizes.widths} and heads {sizes.num_heads}."
            )
    return sizes
