r"""Attention whose weights are a diffusion operator: doubly stochastic, symmetric, and learned."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from qattn import _checks
from qattn._types import ArrayLike
from qattn.nn.diffusion import QDiffusion
from qattn.nn.layouts import Features, PaddedClouds, check_channels
from qattn.operators.diffusion import Diffusion

__all__ = ["QAttention", "QBlock"]


class QAttention(nn.Module):
    r"""Multi-head attention whose weights are the diffusion Q of a Gaussian kernel of points and learned features.

        K_ij = exp(−‖x_i − x_j‖² / 2σ² − ‖c_i − c_j‖² / 2),   c = W f.

    Sinkhorn normalization makes the weights of each head doubly stochastic with respect to the masses: each point
    receives as much as it gives. It removes all factors of rows and columns, so these are also the weights of the dot
    products exp(c_i · c_j) of Sinkformers, without storing the matrix.

    Args:
        dim: Number of channels of the features, a multiple of `num_heads`.
        num_heads: Number of heads, each with a learned bandwidth σ.
        coord_dim: Dimension of the points; with 0, weights depend on the features alone.
        content_dim: Number of channels of c per head; with 0, weights depend on the points alone.
        sigma_range: Least and largest initial bandwidth, in units of the points.
        bias: Whether the projections of values and outputs have a bias.
        **diffusion: Further arguments of `QDiffusion`.

    Examples:
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
        sigma_range: tuple[float, float] = (0.05, 0.5),
        bias: bool = True,
        **diffusion: Any,
    ) -> None:
        super().__init__()
        if _checks.integer("dim", dim, 1) % _checks.integer("num_heads", num_heads, 1):
            raise ValueError(f"`dim` should be a multiple of `num_heads`; got {dim} and {num_heads}.")
        self.coord_dim, self.content_dim = _checks.integer("coord_dim", coord_dim, 0), content_dim
        _checks.integer("content_dim", content_dim, 0 if coord_dim else 1)  # weights need one or the other
        self.diffusion = QDiffusion(num_heads, sigma_range=sigma_range, **diffusion)
        self.value = nn.Linear(dim, dim, bias=bias)
        self.content = nn.Linear(dim, num_heads * content_dim, bias=False) if content_dim else None
        self.out = nn.Linear(dim, dim, bias=bias)

    def _content(self, features: Tensor) -> Tensor | None:
        """Project features to c (B, H, N, content_dim), scaled so that distances do not grow with the dimension."""
        if self.content is None:
            return None
        content = rearrange(self.content(features), "b n (h c) -> b h n c", h=self.diffusion.num_scales)
        return content / self.content_dim**0.5

    def weights(self, features: Tensor, points: Tensor, mass: Tensor | None = None) -> Diffusion:
        """Return the operator (B, H, N, N) that is applied to values (B, H, N, C), for features (B, N, dim)."""
        return self.diffusion.operator(points, mass, content=self._content(features))

    def forward(
        self,
        features: Features,
        points: Tensor | None = None,
        mass: Tensor | None = None,
        *,
        offset: ArrayLike | None = None,
        batch: ArrayLike | None = None,
        warm_start: Diffusion | None = None,
    ) -> Features:
        """Compute new features, in the layout of `features`.

        Args:
            features: Features (N, dim), (B, N, dim) or packed (T, dim), in the dtype of the parameters. Or a dict or an
                object with `feat`, `coord` and `offset` or `batch`; or with `x`, `pos` and optionally `batch`, such as
                a `torch_geometric.data.Data`; and optionally `mass`. In that case a copy with new features is returned.
            points: Positions, in the same layout.
            mass: Masses, in the same layout, 0 for padding; equal within each cloud by default.
            offset: End of each cloud in a packed layout, B integers.
            batch: Index of the cloud of each point in a packed layout, T sorted integers.
            warm_start: Operator of another layer at the same points; see `QDiffusion.operator`.
        """
        clouds = PaddedClouds.of(features, points, mass, offset, batch, self, self.diffusion.ranks)
        check_channels("points", clouds.points, self.coord_dim)
        value = rearrange(self.value(clouds.features), "b n (h c) -> b h n c", h=self.diffusion.num_scales)
        content = self._content(clouds.features)
        out = self.diffusion(value, clouds.points, clouds.mass, content=content, warm_start=warm_start)
        return clouds.restore(self.out(rearrange(out, "b h n c -> b n (h c)")))


class QBlock(nn.Module):
    """A transformer block around a `QAttention`: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        dim: Number of channels of the features.
        num_heads: Number of heads.
        mlp_ratio: Width of the hidden layer of the MLP, in units of `dim`.
        dropout: Fraction of channels that are dropped, after the attention and in the MLP.
        **attention: Further arguments of `QAttention`.

    Examples:
        >>> block = QBlock(64, 4, content_dim=8)
        >>> points, features = torch.randn(300, 3), torch.randn(300, 64)
        >>> cloud = {"coord": points, "feat": features, "offset": torch.tensor([100, 300])}
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

    def forward(
        self,
        features: Features,
        points: Tensor | None = None,
        mass: Tensor | None = None,
        *,
        offset: ArrayLike | None = None,
        batch: ArrayLike | None = None,
        warm_start: Diffusion | None = None,
    ) -> Features:
        """Compute new features, in the layout of `features`; see `QAttention.forward`."""
        clouds = PaddedClouds.of(features, points, mass, offset, batch, self, self.attention.diffusion.ranks)
        x = clouds.features
        attended = self.attention(self.norm_attention(x), clouds.points, clouds.mass, warm_start=warm_start)
        x = x + self.dropout(attended)
        return clouds.restore(x + self.dropout(self.mlp(self.norm_mlp(x))))
