r"""Q-DiffNet: DiffusionNet with its spectral diffusion replaced by diffusion operators at learned scales."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qattn import _checks
from qattn.nn.diffusion import QDiffusion
from qattn.nn.hub import HubMixin
from qattn.nn.layouts import PointModule
from qattn.operators import Diffusion
from qattn.ranks import Ranks

__all__ = ["QDiffNet"]

Gradients = tuple[Tensor | Sequence[Tensor], Tensor | Sequence[Tensor]]


class QDiffNet(
    PointModule,
    HubMixin,
    library_name="qattn",
    tags=["point-cloud", "diffusion-operators"],
):
    r"""The paper's network for features at points: blocks of diffusion, gradients and an MLP each.

    Args:
        in_channels: The channels of the features that go in.
        out_channels: The channels that come out.
        num_scales: The number H of learned bandwidths in each block.
        features: The number P of channels that share a bandwidth. The network is H · P channels wide.
        num_blocks: The number of blocks.
        applications: How often each operator is applied.
        sigma: The least and the largest bandwidth to start from, in the unit of the points.
        gradient: Where the gradients of features come from. "attention": from the operators themselves, in space,

            .. math:: \nabla (Q f) = \bigl(Q (f \otimes x) - Q f \otimes Q x\bigr) / \sigma^2,

            which needs no neighbours and no frames. "tangent": from matrices given as `gradients`, as in DiffusionNet.
            "none": the network goes without, and sees no directions.
        chiral: Whether the volumes of three gradients in space are taken too, which tell left from right. Without them,
            and without inputs that can, the network sees mirror images as the same. With "attention" only.
        output: "points" for outputs at the points, "mean" for one of each cloud, averaged by mass.
        hidden_layers: Those of the MLP of each block; two, as in DiffusionNet, or fewer, which learn faster.
        dropout: The share of channels that are dropped within the MLPs.
        recompute: Whether the blocks are computed again in the backward pass, which saves memory.
        **diffusion: Further arguments of `QDiffusion`.

    Example:
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
        features: int = 8,
        num_blocks: int = 4,
        applications: int = 2,
        sigma: tuple[float, float] = (0.02, 0.5),
        gradient: str = "attention",
        chiral: bool = False,
        output: str = "points",
        hidden_layers: int = 2,
        dropout: float = 0.0,
        recompute: bool = False,
        **diffusion: Any,
    ) -> None:
        super().__init__()
        _checks.one_of("gradient", gradient, ("attention", "tangent", "none"))
        _checks.one_of("output", output, ("points", "mean"))
        if chiral:
            _checks.chiral(gradient)
        width = num_scales * _checks.integer("features", features, 1)
        self.in_channels, self.gradient, self.output, self.recompute = in_channels, gradient, output, recompute
        self.chiral = chiral
        self.first = nn.Linear(in_channels, width)
        self.blocks = nn.ModuleList(
            _Block(
                QDiffusion(num_scales, sigma=sigma, applications=applications, **diffusion),
                width,
                gradient,
                chiral,
                _checks.integer("hidden_layers", hidden_layers, 0),
                dropout,
            )
            for _ in range(_checks.integer("num_blocks", num_blocks, 1))
        )
        self.last = nn.Linear(width, out_channels)

    @property
    def ranks(self) -> Ranks:
        return self.blocks[0].diffusion.ranks  # type: ignore[union-attr,return-value]

    def at_points(
        self, features: Tensor, points: Tensor, mass: Tensor, *, gradients: Gradients | None = None
    ) -> Tensor:
        """Outputs (B, N, out_channels), or (B, out_channels) of whole clouds.

        `gradients` are gradX and gradY of `tangent_gradients`, each a sparse matrix for all clouds, or one for each.
        """
        _checks.channels("features", features, self.in_channels)
        if self.chiral:
            _checks.chiral_points(points)
        _checks.gradients(gradients, self.gradient == "tangent", features)
        x, q = self.first(features), None
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x, q = checkpoint(block, x, points, mass, q, gradients, use_reentrant=False)
            else:
                x, q = block(x, points, mass, q, gradients)
        x = self.last(x)
        if self.output == "points":
            return x
        share = (mass / self.ranks.total(mass)[..., None])[..., None].to(x)
        return self.ranks.total((share * x).mT)


class _Block(nn.Module):
    """x + mlp(x, diffused x, products of its gradients)."""

    def __init__(
        self, diffusion: QDiffusion, width: int, gradient: str, chiral: bool, hidden_layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.diffusion, self._gradient = diffusion, gradient
        self.mix = None if gradient == "none" else nn.Linear(width, width, bias=False)
        self.turn = nn.Linear(width, width, bias=False) if gradient == "tangent" else None
        self.handed = nn.Linear(width, 2 * width, bias=False) if chiral else None
        widths = [(2 if gradient == "none" else 3) * width] + hidden_layers * [width]
        hidden = [(nn.Linear(w, width), nn.ReLU(), nn.Dropout(dropout)) for w in widths[:-1]]
        self.mlp = nn.Sequential(*(layer for layers in hidden for layer in layers), nn.Linear(widths[-1], width))

    def forward(
        self, x: Tensor, points: Tensor, mass: Tensor, near: Diffusion | None, gradients: Gradients | None
    ) -> tuple[Tensor, Diffusion | None]:
        """New features (B, N, W), and the operator, for the next block to start from."""
        signal = rearrange(x, "b n (h p) -> b h n p", h=self.diffusion.num_scales)
        value, slope, q = self.diffusion.diffused(
            signal, points, mass, near=near, gradient=self._gradient == "attention"
        )
        diffused = rearrange(value, "b h n p -> b n (h p)")
        parts = [x, diffused]
        if slope is not None:
            # In the unit of the points: coordinates have slopes near 1 at all scales, so their products tell how the
            # surface lies. In units of the bandwidth they would be near σ², too small for an MLP to see.
            parts.append(self._products(rearrange(slope, "b h n p d -> b n d (h p)")))
        elif gradients is not None:
            parts.append(self._products(torch.stack([_multiplied(g, diffused) for g in gradients], dim=2)))
        return x + self.mlp(torch.cat(parts, dim=-1)), q

    def _products(self, slopes: Tensor) -> Tensor:
        """tanh(g · Ag) for gradients g (B, N, d, W): what a rotation of the space, or of a frame, does not change.

        In a plane, A may also turn gradients by a right angle. In space, the volume det(g, Bg, Cg) of their directions
        may be added, which a mirror takes to its negative.
        """
        assert self.mix is not None
        mixed = self.mix(slopes)
        if self.turn is not None:
            turned = self.turn(slopes)
            mixed = mixed + torch.stack([-turned[:, :, 1], turned[:, :, 0]], dim=2)
        products = (slopes * mixed).sum(2)
        if self.handed is not None:
            # Of directions, because the products of three small gradients would be lost beside those of two.
            first, second, third = (_direction(g) for g in (slopes, *self.handed(slopes).chunk(2, dim=-1)))
            products = products + (first * torch.linalg.cross(second, third, dim=2)).sum(2)
        return torch.tanh(products)


def _direction(slopes: Tensor) -> Tensor:
    """Gradients (B, N, d, W) of a length below 1, and 0 where there are none."""
    return slopes * torch.rsqrt(slopes.square().sum(2, keepdim=True) + 1e-3)


def _multiplied(matrix: Tensor | Sequence[Tensor], x: Tensor) -> Tensor:
    """Sparse (n, n), for all clouds or one for each, by x (B, N, W); 0 at the padding behind n points."""
    matrices = [matrix] * len(x) if isinstance(matrix, Tensor) and matrix.ndim == 2 else list(matrix)
    rows = [m.to(x.dtype) @ cloud[: len(m)] for m, cloud in zip(matrices, x, strict=True)]
    return torch.stack([nn.functional.pad(row, (0, 0, 0, x.shape[1] - len(row))) for row in rows])
