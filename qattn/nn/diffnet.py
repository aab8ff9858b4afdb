r"""Q-DiffNet: DiffusionNet with its spectral diffusion replaced by diffusion operators at learned scales."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qattn import _checks
from qattn._types import ArrayLike
from qattn.nn.diffusion import QDiffusion
from qattn.nn.hub import HubMixin
from qattn.nn.layouts import Features, PaddedClouds, check_channels
from qattn.operators.diffusion import Diffusion
from qattn.operators.sinkhorn import Solver

__all__ = ["QDiffNet"]

Gradients = tuple[Tensor | Sequence[Tensor], Tensor | Sequence[Tensor]]


class QDiffNet(
    nn.Module,
    HubMixin,
    library_name="qattn",
    tags=["point-cloud", "diffusion-operators"],
    coders={Solver: (asdict, lambda options: Solver(**options))},
):
    r"""The network of the paper for features at points: blocks of diffusion, gradients and an MLP.

    Args:
        in_channels: Number of channels of the input features.
        out_channels: Number of channels of the outputs.
        num_scales: Number H of learned bandwidths per block.
        channels_per_scale: Number P of channels per bandwidth. The network is H · P channels wide.
        num_blocks: Number of blocks.
        num_applications: Number of applications of each operator.
        sigma_range: Least and largest initial bandwidth, in units of the points.
        gradient: Source of the gradients of features. "attention" uses the operators themselves, in space,

                ∇(Qf) = (Q(f ⊗ x) − Qf ⊗ Qx) / σ²,

            which needs no neighbors and no frames. "tangent" uses matrices that are passed as `gradients`, as in
            DiffusionNet. With "none" there are no gradients, and the network sees no directions.
        chiral: Whether to add volumes of three gradients in space, which distinguish left from right. Without them the
            network cannot distinguish mirror images, unless its inputs do. Only with "attention".
        output: "points" for outputs at the points, "mean" for one output per cloud, averaged by mass.
        num_hidden_layers: Number of hidden layers of the MLP per block: two, as in DiffusionNet, or fewer, which learn
            faster.
        dropout: Fraction of channels that are dropped within the MLPs.
        recompute: Whether to recompute the blocks in the backward pass, which saves memory.
        solver: Options of the Sinkhorn iteration and of its derivative.
        **diffusion: Further arguments of `QDiffusion`.

    Examples:
        >>> network = QDiffNet(3, 16, num_scales=4, num_blocks=2)
        >>> points = torch.randn(2, 100, 3)
        >>> network(points, points).shape
        torch.Size([2, 100, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        num_scales: int = 32,
        channels_per_scale: int = 8,
        num_blocks: int = 4,
        num_applications: int = 2,
        sigma_range: tuple[float, float] = (0.02, 0.5),
        gradient: Literal["attention", "tangent", "none"] = "attention",
        chiral: bool = False,
        output: Literal["points", "mean"] = "points",
        num_hidden_layers: int = 2,
        dropout: float = 0.0,
        recompute: bool = False,
        solver: Solver = Solver(),  # noqa: B008 (it is frozen)
        **diffusion: Any,
    ) -> None:
        super().__init__()
        _checks.one_of("gradient", gradient, ("attention", "tangent", "none"))
        _checks.one_of("output", output, ("points", "mean"))
        if chiral and gradient != "attention":
            raise ValueError(f'`chiral` needs gradients in space, `gradient="attention"`; got {gradient!r}.')
        width = num_scales * _checks.integer("channels_per_scale", channels_per_scale, 1)
        self.in_channels, self.gradient, self.output, self.recompute = in_channels, gradient, output, recompute
        self.chiral = chiral
        self.first = nn.Linear(in_channels, width)
        options = {"sigma_range": sigma_range, "num_applications": num_applications, "solver": solver, **diffusion}
        self.blocks = nn.ModuleList(
            _Block(
                QDiffusion(num_scales, **options),
                width,
                gradient,
                chiral,
                _checks.integer("num_hidden_layers", num_hidden_layers, 0),
                dropout,
            )
            for _ in range(_checks.integer("num_blocks", num_blocks, 1))
        )
        self.last = nn.Linear(width, out_channels)

    def forward(
        self,
        features: Features,
        points: Tensor | None = None,
        mass: Tensor | None = None,
        *,
        offset: ArrayLike | None = None,
        batch: ArrayLike | None = None,
        gradients: Gradients | None = None,
    ) -> Features:
        """Compute outputs (B, N, out_channels), or (B, out_channels) for "mean", in the layout of the features.

        Args:
            features: Features in any layout; see `QAttention.forward`.
            points: Positions, in the same layout.
            mass: Masses, in the same layout, 0 for padding; equal within each cloud by default.
            offset: End of each cloud in a packed layout.
            batch: Index of the cloud of each point in a packed layout.
            gradients: gradX and gradY of `tangent_gradients`, each one sparse matrix for all clouds, or one per cloud.
        """
        ranks = self.blocks[0].diffusion.ranks  # type: ignore[union-attr]
        clouds = PaddedClouds.of(features, points, mass, offset, batch, self, ranks)  # type: ignore[arg-type]
        check_channels("features", clouds.features, self.in_channels)
        if self.chiral and clouds.points.shape[-1] != 3:
            raise ValueError(
                "`points` should have 3 coordinates, as `chiral=True` uses volumes of gradients in space; got shape "
                f"{tuple(clouds.points.shape)}."
            )
        _check_gradients(gradients, self.gradient == "tangent", clouds.features)
        x, q = self.first(clouds.features), None
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x, q = checkpoint(block, x, clouds.points, clouds.mass, q, gradients, use_reentrant=False)
            else:
                x, q = block(x, clouds.points, clouds.mass, q, gradients)
        x = self.last(x)
        if self.output == "mean":
            share = (clouds.mass / ranks.total(clouds.mass)[..., None])[..., None].to(x)  # type: ignore[operator,union-attr]
            x = ranks.total((share * x).mT)  # type: ignore[operator,union-attr]
        return clouds.restore(x)


class _Block(nn.Module):
    """A residual block: x + mlp(x, diffused x, products of gradients)."""

    def __init__(
        self, diffusion: QDiffusion, width: int, gradient: str, chiral: bool, num_hidden_layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.diffusion, self._gradient = diffusion, gradient
        self.mix = None if gradient == "none" else nn.Linear(width, width, bias=False)
        self.turn = nn.Linear(width, width, bias=False) if gradient == "tangent" else None
        self.handed = nn.Linear(width, 2 * width, bias=False) if chiral else None
        widths = [(2 if gradient == "none" else 3) * width] + num_hidden_layers * [width]
        hidden = [(nn.Linear(w, width), nn.ReLU(), nn.Dropout(dropout)) for w in widths[:-1]]
        self.mlp = nn.Sequential(*(layer for layers in hidden for layer in layers), nn.Linear(widths[-1], width))

    def forward(
        self, x: Tensor, points: Tensor, mass: Tensor, warm_start: Diffusion | None, gradients: Gradients | None
    ) -> tuple[Tensor, Diffusion | None]:
        """Compute new features (B, N, W), and return the operator as warm start of the next block."""
        signal = rearrange(x, "b n (h p) -> b h n p", h=self.diffusion.num_scales)
        value, slope, q = self.diffusion.diffused(
            signal, points, mass, warm_start=warm_start, gradient=self._gradient == "attention"
        )
        diffused = rearrange(value, "b h n p -> b n (h p)")
        parts = [x, diffused]
        if slope is not None:
            # In units of the points, in which slopes of coordinates are near 1 at all scales, and their products show
            # the direction of the surface. In units of the bandwidth they would be near σ², too small for an MLP.
            parts.append(self._products(rearrange(slope, "b h n p d -> b n d (h p)")))
        elif gradients is not None:
            parts.append(self._products(torch.stack([_multiplied(g, diffused) for g in gradients], dim=2)))
        return x + self.mlp(torch.cat(parts, dim=-1)), q

    def _products(self, slopes: Tensor) -> Tensor:
        """Compute tanh(g · Ag) for gradients g (B, N, d, W), which is invariant to rotations of space or of frames.

        In a plane, A may also turn gradients by a right angle. In space, the volume det(g, Bg, Cg) of their directions
        may be added, which changes its sign under reflections.
        """
        assert self.mix is not None
        mixed = self.mix(slopes)
        if self.turn is not None:
            turned = self.turn(slopes)
            mixed = mixed + torch.stack([-turned[:, :, 1], turned[:, :, 0]], dim=2)
        products = (slopes * mixed).sum(2)
        if self.handed is not None:
            # Of directions, because products of three small gradients would be negligible beside products of two.
            first, second, third = (_direction(g) for g in (slopes, *self.handed(slopes).chunk(2, dim=-1)))
            products = products + (first * torch.linalg.cross(second, third, dim=2)).sum(2)
        return torch.tanh(products)


def _direction(slopes: Tensor) -> Tensor:
    """Scale gradients (B, N, d, W) to lengths just below 1, and smoothly to 0 where they vanish."""
    return slopes * torch.rsqrt(slopes.square().sum(2, keepdim=True) + 1e-3)


def _multiplied(matrix: Tensor | Sequence[Tensor], x: Tensor) -> Tensor:
    """Multiply x (B, N, W) by sparse matrices (n, n), one for all clouds or one per cloud; 0 at the padding."""
    matrices = [matrix] * len(x) if isinstance(matrix, Tensor) and matrix.ndim == 2 else list(matrix)
    rows = [m.to(x.dtype) @ cloud[: len(m)] for m, cloud in zip(matrices, x, strict=True)]
    return torch.stack([nn.functional.pad(row, (0, 0, 0, x.shape[1] - len(row))) for row in rows])


def _check_gradients(gradients: Gradients | None, is_needed: bool, features: Tensor) -> None:
    """Check gradX and gradY for features (B, N, C)."""
    if (gradients is not None) != is_needed:
        if is_needed:
            raise ValueError('`gradients` should be given with `gradient="tangent"`. Use those of `tangent_gradients`.')
        raise ValueError('`gradients` should only be given with `gradient="tangent"`. Leave them out.')
    for matrix in gradients or ():
        is_shared = isinstance(matrix, Tensor) and matrix.ndim == 2
        matrices: list[Tensor] = [matrix] if is_shared else list(matrix)  # type: ignore[list-item]
        sizes = [m.shape for m in matrices]
        has_count = is_shared or len(matrices) == len(features)
        if not has_count or any(s[0] != s[1] or s[0] > features.shape[1] for s in sizes):
            raise ValueError(
                f"`gradients` should be matrices (N, N), one for all clouds or one for each of the {len(features)} "
                f"clouds, with N at most {features.shape[1]}; got {[tuple(s) for s in sizes]}."
            )
