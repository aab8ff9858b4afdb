r"""Attention whose weights are a diffusion operator: doubly stochastic, symmetric, and learned."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from qattn import _checks
from qattn.nn.diffusion import QDiffusion
from qattn.nn.layouts import PointModule
from qattn.operators import Diffusion
from qattn.ranks import Ranks

__all__ = ["QAttention", "QBlock"]


class QAttention(PointModule):
    r"""Multi-head attention with the weights Q of a Gaussian kernel between points, and between learned features.

    .. math:: K_{ij} = \exp(-\|x_i - x_j\|^2 / 2\sigma^2 - \|c_i - c_j\|^2 / 2), \qquad c = W f.

    Sinkhorn normalisation makes the weights of each head doubly stochastic for the masses: each point receives as much
    as it gives. It takes away whatever scales rows and columns, so these are also the weights of the dot products
    exp(c_i · c_j) of Sinkformers, here without a matrix.

    Args:
        dim: The channels of the features, a multiple of `num_heads`.
        num_heads: The number of heads, with a learned bandwidth σ each.
        coord_dim: The dimension of the points.
        content_dim: The channels of c in each head; 0 for weights by the points alone.
        sigma: The least and the largest bandwidth to start from, in the unit of the points.
        bias: Whether the projections of values and outputs have one.
        **diffusion: Further arguments of `QDiffusion`.

    Example:
        >>> attention = QAttention(64, 4, content_dim=8)
        >>> attention(torch.randn(2, 100, 64), torch.randn(2, 100, 3)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        coord_dim: int = 3,
        content_dim: int = 0,
        sigma: tuple[float, float] = (0.05, 0.5),
        bias: bool = True,
        **diffusion: Any,
    ) -> None:
        super().__init__()
        _checks.divisible("dim", dim, "num_heads", num_heads)
        self.coord_dim = _checks.integer("coord_dim", coord_dim, 1)
        self.content_dim = _checks.integer("content_dim", content_dim, 0)
        self.diffusion = QDiffusion(num_heads, sigma=sigma, **diffusion)
        self.value = nn.Linear(dim, dim, bias=bias)
        self.content = nn.Linear(dim, num_heads * content_dim, bias=False) if content_dim else None
        self.out = nn.Linear(dim, dim, bias=bias)

    @property
    def ranks(self) -> Ranks:
        return self.diffusion.ranks

    def _content(self, features: Tensor) -> Tensor | None:
        """c (B, H, N, content_dim); of distances that do not grow with their dimension, as dot products are scaled."""
        if self.content is None:
            return None
        content = rearrange(self.content(features), "b n (h c) -> b h n c", h=self.diffusion.num_scales)
        return content / self.content_dim**0.5

    def weights(self, features: Tensor, points: Tensor, mass: Tensor | None = None) -> Diffusion:
        """The operator (B, H, N, N) that the values (B, H, N, C) are multiplied by, for features (B, N, dim)."""
        return self.diffusion.operator(points, mass, content=self._content(features))

    def at_points(self, features: Tensor, points: Tensor, mass: Tensor, *, near: Diffusion | None = None) -> Tensor:
        """Features (B, N, dim); for `near` see `QDiffusion.operator`."""
        _checks.channels("points", points, self.coord_dim)
        value = rearrange(self.value(features), "b n (h c) -> b h n c", h=self.diffusion.num_scales)
        out = self.diffusion(value, points, mass, content=self._content(features), near=near)
        return self.out(rearrange(out, "b h n c -> b n (h c)"))


class QBlock(PointModule):
    """A transformer block, x + attention(norm(x)) and then x + mlp(norm(x)), around a `QAttention`.

    Args:
        dim: The channels of the features.
        num_heads: The number of heads.
        mlp_ratio: How many times wider the hidden layer of the MLP is.
        dropout: The share of channels that are dropped, of both.
        **attention: Further arguments of `QAttention`.

    Example:
        >>> block = QBlock(64, 4, content_dim=8)
        >>> cloud = {"coord": torch.randn(300, 3), "feat": torch.randn(300, 64), "offset": torch.tensor([100, 300])}
        >>> block(cloud)["feat"].shape
        torch.Size([300, 64])
    """

    def __init__(
        self, dim: int, num_heads: int, *, mlp_ratio: float = 4.0, dropout: float = 0.0, **attention: Any
    ) -> None:
        super().__init__()
        hidden = int(mlp_ratio * dim)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = QAttention(dim, num_heads, **attention)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim))
        self.dropout = nn.Dropout(dropout)

    @property
    def ranks(self) -> Ranks:
        return self.attention.ranks

    def at_points(self, features: Tensor, points: Tensor, mass: Tensor, *, near: Diffusion | None = None) -> Tensor:
        """Features (B, N, dim); for `near` see `QDiffusion.operator`."""
        attended = self.attention.at_points(self.norm_attention(features), points, mass, near=near)
        features = features + self.dropout(attended)
        return features + self.dropout(self.mlp(self.norm_mlp(features)))
