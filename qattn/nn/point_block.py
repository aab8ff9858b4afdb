r"""Parts of `QPointTransformer`: a transformer block on one level, and attention from a level to finer points."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from qattn._eager import eager
from qattn.kernels import GaussianKernel
from qattn.nn.diffusion import QDiffusion
from qattn.operators.diffusion import Diffusion
from qattn.operators.scaling import log_of_mass

__all__ = ["Extension", "PointBlock", "ResidualMLP"]

_NORMAL_SIGMA = 0.7  # initial bandwidth of unit normals: opposite sides of a thin part have the weight e^−4
_FLAT = 1e-3  # squared size of a gradient whose direction counts half as much
_EXTENSION_SIGMA = 0.5  # initial bandwidth of extensions, in units of cells


class ResidualMLP(nn.Module):
    """x + mlp(norm(x)), with the second term dropped for whole clouds at random."""

    def __init__(self, width: int, ratio: float, dropout: float, drop_path: float) -> None:
        super().__init__()
        hidden = int(ratio * width)
        self.norm, self.drop_path = nn.LayerNorm(width), _DropPath(drop_path)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.mlp(self.norm(x)))


class PointBlock(nn.Module):
    """A transformer block on one level: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        width: Number of channels of the features.
        num_heads: Number of heads.
        coord_dim: Dimension of the positions.
        content_dim: Number of channels of learned content per head; 0 for weights by position (and normals) alone.
        gradient_dim: Number of channels per head whose gradients are used; with 0, positions are not averaged either.
        normals: Whether points have normals.
        mlp_ratio: Width of the hidden layer of the MLP, in units of `width`.
        dropout: Fraction of channels that are dropped.
        drop_path: Fraction of clouds for which attention, or the MLP, is dropped.
        **diffusion: Further arguments of `QDiffusion`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        coord_dim: int,
        content_dim: int,
        gradient_dim: int,
        normals: bool,
        mlp_ratio: float,
        dropout: float,
        drop_path: float,
        **diffusion: Any,
    ) -> None:
        super().__init__()
        self._gradient_dim, self._content_dim = gradient_dim, content_dim
        self.norm, self.drop_path, self.dropout = nn.LayerNorm(width), _DropPath(drop_path), nn.Dropout(dropout)
        self.diffusion = QDiffusion(num_heads, **diffusion)
        self.value = nn.Linear(width, width)
        self.content = nn.Linear(width, num_heads * content_dim, bias=False) if content_dim else None
        self.log_tau = nn.Parameter(torch.full((num_heads,), _NORMAL_SIGMA).log()) if normals else None
        slopes = num_heads * gradient_dim
        self.mix = nn.Linear(slopes, slopes, bias=False) if gradient_dim else None
        shifts = num_heads * coord_dim if gradient_dim else 0
        self.out = nn.Linear(width + shifts + (1 + coord_dim) * slopes, width)
        self.mlp = ResidualMLP(width, mlp_ratio, dropout, drop_path)

    def forward(
        self, x: Tensor, points: Tensor, mass: Tensor, normals: Tensor | None, warm_start: Diffusion | None
    ) -> tuple[Tensor, Diffusion | None]:
        """Compute new features (B, N, W), and return the operator as warm start of the next block.

        Args:
            x: Features (B, N, W).
            points: Positions (B, N, d) in units of cells.
            mass: Masses (B, N).
            normals: Normals (B, N, d), if the block has been made for them.
            warm_start: Operator of the block before on the same level.
        """
        attended, q = self._attended(self.norm(x), points, mass, normals, warm_start)
        return self.mlp(x + self.drop_path(self.dropout(attended))), q

    def _coordinates(self, x: Tensor, normals: Tensor | None) -> Tensor | None:
        """Return further coordinates of each head, (B, H, N, c): content W x, and normals in units of a bandwidth."""
        parts, H = [], self.diffusion.num_scales
        if self.content is not None:
            content = rearrange(self.content(x), "b n (h c) -> b h n c", h=H)
            parts.append(content.to(torch.promote_types(content.dtype, torch.float32)) / self._content_dim**0.5)
        if self.log_tau is not None and normals is not None:
            parts.append(normals[:, None] / self.log_tau.to(normals).exp()[:, None, None])
        return torch.cat(parts, dim=-1) if parts else None

    def _attended(
        self, x: Tensor, points: Tensor, mass: Tensor, normals: Tensor | None, warm_start: Diffusion | None
    ) -> tuple[Tensor, Diffusion | None]:
        """Apply Q to values v and, in the same pass, to f ⊗ x and x for gradients of the first values f."""
        v = rearrange(self.value(x), "b n (h p) -> b h n p", h=self.diffusion.num_scales).to(points)
        f, signal = v[..., : self._gradient_dim], [v]
        if self.mix is not None:
            places = points[:, None].expand(*v.shape[:-1], -1)
            signal += [(f[..., None] * places[..., None, :]).flatten(-2), places]
        averages, _, q = self.diffusion.diffused(
            torch.cat(signal, dim=-1), points, mass, content=self._coordinates(x, normals), warm_start=warm_start
        )
        P, G, d = v.shape[-1], f.shape[-1], points.shape[-1]
        parts = [rearrange(averages[..., :P], "b h n p -> b n (h p)")]
        if self.mix is not None:
            mean_fx, mean_x = averages[..., P:].split([G * d, d], dim=-1)
            sigma = self.diffusion.sigma[:, None, None]
            # σ∇(Qf) = (Q(f ⊗ x) − Qf ⊗ Qx) / σ, whose size does not depend on the bandwidth.
            slopes = mean_fx.unflatten(-1, (G, d)) - averages[..., :G, None] * mean_x[..., None, :]
            slopes = rearrange(slopes / sigma[..., None], "b h n g d -> b n d (h g)")
            shift = (mean_x - places) / sigma  # towards where the points around are
            parts += [slopes.flatten(2), rearrange(shift, "b h n d -> b n (h d)"), self._angles(slopes, x.dtype)]
        return self.out(torch.cat([part.to(x.dtype) for part in parts], dim=-1)), q

    def _angles(self, slopes: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute tanh(g · Ag) for the directions g of gradients (B, N, d, W): how surfaces lie and bend."""
        assert self.mix is not None
        directions = slopes * torch.rsqrt(slopes.square().sum(2, keepdim=True) + _FLAT)
        return torch.tanh((directions * self.mix(directions.to(dtype))).sum(2))


class Extension(nn.Module):
    r"""Attention from any points y to those of a level: rows Σ_j K(y, x_j) m_j v_j / Σ_j K(y, x_j) m_j."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, out_width)
        self.log_sigma = nn.Parameter(torch.tensor(_EXTENSION_SIGMA).log())

    def forward(self, x: Tensor, points: Tensor, mass: Tensor, targets: Tensor) -> Tensor:
        """Extend features x (B, M, W) at points (B, M, d) with masses (B, M) to targets (B, N, d)."""
        return _extended(self.linear(self.norm(x)), points, mass, targets, self.log_sigma.to(points).exp())


@eager
def _extended(value: Tensor, points: Tensor, mass: Tensor, targets: Tensor, sigma: Tensor) -> Tensor:
    out = GaussianKernel(points, sigma).at(targets).attend(log_of_mass(mass), value.to(points)).out
    assert out is not None
    return out.to(value.dtype)


class _DropPath(nn.Module):
    """Set features of whole clouds to 0 at random, and scale the others up by as much, in training."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction

    def extra_repr(self) -> str:
        return f"{self.fraction:g}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.fraction == 0:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.fraction
        return torch.where(kept, x / (1 - self.fraction), 0)
