r"""Attention by diffusion with the call of `torch.nn.MultiheadAttention`."""

from typing import Any

import torch
from torch import Tensor, nn

from qattn import _checks
from qattn.nn.attention import QAttention

__all__ = ["QMultiheadAttention"]


class QMultiheadAttention(nn.Module):
    r"""Self-attention with the weights Q of learned features, called as `torch.nn.MultiheadAttention` is.

        K_ij = exp(−‖c_i − c_j‖² / 2),   c = W x,

    times exp(−‖p_i − p_j‖² / 2σ²) with positions p. Normalization reduces K to the dot products exp(c_i · c_j), and
    makes the weights of each head symmetric and doubly stochastic. So one projection serves as query and as key, and
    there is neither attention to another sequence nor a causal mask. It may take the place of `self_attn` in a
    `torch.nn.TransformerEncoderLayer`.

    Args:
        embed_dim: Number of channels of the tokens, a multiple of `num_heads`.
        num_heads: Number of heads.
        dropout: Fraction of channels of the outputs that are dropped.
        bias: Whether the projections of values and outputs have a bias.
        batch_first: Whether tokens are (B, N, C) instead of (N, B, C).
        content_dim: Number of channels of c per head; `embed_dim // num_heads` by default.
        coord_dim: Dimension of the positions; with 0 there are none.
        sigma_range: Least and largest initial bandwidth of the heads, in units of the positions.
        **diffusion: Further arguments of `QDiffusion`.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> layer.self_attn = QMultiheadAttention(64, 4, batch_first=True)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    # By these, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` know that fused softmax attention is not meant.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        content_dim: int | None = None,
        coord_dim: int = 0,
        sigma_range: tuple[float, float] = (0.05, 0.5),
        **diffusion: Any,
    ) -> None:
        super().__init__()
        _checks.integer("num_heads", num_heads, 1)
        content_dim = embed_dim // num_heads if content_dim is None else _checks.integer("content_dim", content_dim, 1)
        if coord_dim == 0:  # a bandwidth without positions means nothing
            diffusion["learn_sigma"] = False
        self.attention = QAttention(
            embed_dim,
            num_heads,
            coord_dim=coord_dim,
            content_dim=content_dim,
            sigma_range=sigma_range,
            bias=bias,
            **diffusion,
        )
        self.batch_first, self.dropout = batch_first, nn.Dropout(dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        points: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute new features, in the layout of `query`.

        Args:
            query: Tokens (B, N, C), (N, B, C) without `batch_first`, or (N, C).
            key: `query` itself, or None.
            value: `query` itself, or None.
            key_padding_mask: True where there is no token, shape (B, N), or (N,); or −∞ there and 0 elsewhere.
            need_weights: Whether to return the weights, which takes O(N²) memory.
            attn_mask: None.
            average_attn_weights: Whether to average the weights over heads.
            is_causal: False.
            points: Positions of the tokens, in the same layout, if the module was made with `coord_dim`.

        Returns:
            Features; and the weights (B, N, N), or (B, H, N, N) if they are not averaged, or None.
        """
        _check_self_attention(query, key, value, attn_mask, is_causal)
        coord_dim = self.attention.coord_dim
        if (points is None) != (coord_dim == 0):
            got = "none" if points is None else _checks.shape_of(points)
            raise ValueError(
                f"`points` should be given if and only if the module has positions; it was made with "
                f"`coord_dim={coord_dim}`, and got {got}."
            )
        if points is None:
            points = query.new_empty(*query.shape[:-1], 0)
        is_turned = query.ndim == 3 and not self.batch_first
        if is_turned:
            query, points = query.transpose(0, 1), points.transpose(0, 1)
        mass = None if key_padding_mask is None else _is_token(key_padding_mask).to(query.dtype)
        out = self.dropout(self.attention(query, points, mass))
        weights = self._weights(query, points, mass, average_attn_weights) if need_weights else None
        return out.transpose(0, 1) if is_turned else out, weights

    def _weights(self, x: Tensor, points: Tensor, mass: Tensor | None, is_averaged: bool) -> Tensor:
        """Weights (B, N, N), or (B, H, N, N), without the batch axis for tokens (N, C)."""
        if x.ndim == 2:
            return self._weights(x[None], points[None], None if mass is None else mass[None], is_averaged)[0]
        weights = self.attention.weights(x, points, mass).to_dense()
        return weights.mean(1) if is_averaged else weights


def _is_token(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask == 0


def _check_self_attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, attn_mask: Tensor | None, is_causal: bool
) -> None:
    """Check that a call is one of self-attention without a mask."""
    for name, other in (("key", key), ("value", value)):
        if other is not None and other is not query:
            raise ValueError(
                f"`{name}` should be `query` itself: diffusion is symmetric, among the points of one cloud. For "
                "other places, use `qattn.diffusion(…).extend`."
            )
    if attn_mask is not None or is_causal:
        raise ValueError(
            "`attn_mask` should be None, and `is_causal` False: symmetric weights cannot be causal. "
            "Padding is `key_padding_mask`."
        )
