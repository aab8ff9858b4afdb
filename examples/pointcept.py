"""Attention by diffusion in Pointcept's Point Transformer V3: a drop-in for its `SerializedAttention`.

    # point_transformer_v3m1_base.py, with a copy of this file beside it as q_attention.py
    +from .q_attention import QSerializedAttention
    …
    -        self.attn = SerializedAttention(
    +        self.attn = QSerializedAttention(

It takes the arguments of `SerializedAttention` and a `Point`, and changes its `feat`. Serialized attention is softmax
among 48 points that follow one another on a space-filling curve; this is diffusion in space, among all near points.
Bandwidths are in units of the stage's cells (`grid_coord`), so that all stages start alike. A point of a pooled stage
has the mass of the points that were merged (`pooling_inverse`), so that every stage sees the same measure.

The script draws from which points a point on an animal gets its features, by either.
"""

import argparse

import torch
from quick import parsed
from torch import nn

from qattn.nn import QAttention
from qattn.pictures import camera_view, facing_normals, figure, heat, scatter
from qattn.shapes import creature

PATCH = 48  # points, as in Point Transformer V3


class QSerializedAttention(nn.Module):
    """Multi-head attention whose weights are Q, on a `Point` of Pointcept.

    Args:
        channels: Number of channels of `feat`.
        num_heads: Number of heads.
        patch_size: Not used: there are no patches.
        qkv_bias: Whether projections have a bias.
        qk_scale: None: distances of content have their own scale, which is learned.
        attn_drop: 0: without some of its weights, Q would not be stochastic.
        proj_drop: Fraction of channels of the results that are dropped.
        order_index: Not used: there is no order.
        enable_rpe: False: positions are in the kernel.
        enable_flash, upcast_attention, upcast_softmax: Not used: geometry is in float32.
        content_dim: Number of channels of the learned content of a head.
        sigma_range: Least and largest initial bandwidth, in units of the stage's cells.
        **diffusion: Further arguments of `qattn.nn.QDiffusion`.
    """

    def __init__(
        self,
        channels,
        num_heads,
        patch_size=None,
        qkv_bias=True,
        qk_scale=None,
        attn_drop=0.0,
        proj_drop=0.0,
        order_index=0,
        enable_rpe=False,
        enable_flash=True,
        upcast_attention=True,
        upcast_softmax=True,
        *,
        content_dim=8,
        sigma_range=(1.0, 3.0),
        **diffusion,
    ):
        super().__init__()
        if qk_scale is not None or attn_drop or enable_rpe:
            raise ValueError(
                "`qk_scale` should be None, `attn_drop` 0 and `enable_rpe` False, as Q has no dot products to scale, "
                f"weights to drop or positions to add; got {qk_scale}, {attn_drop} and {enable_rpe}."
            )
        options = {"content_dim": content_dim, "sigma_range": sigma_range, "bias": qkv_bias, **diffusion}
        self.attention, self.proj_drop = QAttention(channels, num_heads, **options), nn.Dropout(proj_drop)

    def forward(self, point):
        """Change `point["feat"]`, and return the point."""
        feat, cells = point["feat"], point["grid_coord"].float()
        point["feat"] = self.proj_drop(self.attention(feat, cells, mass_of(point), offset=point["offset"]))
        return point


def mass_of(point):
    """Numbers (T,) of points that were merged to those of a stage; kept in the point as `mass`."""
    if "mass" not in point:
        if "pooling_parent" in point:
            parts, cluster = mass_of(point["pooling_parent"]), point["pooling_inverse"]
            point["mass"] = parts.new_zeros(len(point["feat"])).index_add(0, cluster, parts)
        else:
            point["mass"] = torch.ones(len(point["feat"]), device=point["feat"].device)
    return point["mass"]


def z_order(cells, depth=10):
    """Codes (T,) of cells (T, 3) by interleaved bits."""
    bits = (cells[:, None] >> torch.arange(depth)[:, None]) & 1  # (T, depth, 3)
    return (bits << (3 * torch.arange(depth)[:, None] + torch.arange(3))).sum((1, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=6000)
    parser.add_argument("--grid-size", type=float, default=0.03)
    parser.add_argument("--output", default="pointcept.png")
    options = parsed(parser, points=600)

    every, _ = creature(options.points)
    cells, index, counts = torch.unique(
        ((every - every.amin(0)) / options.grid_size).int(), dim=0, return_inverse=True, return_counts=True
    )
    coord = (
        torch.zeros(len(cells), 3).index_add(0, index, every) / counts[:, None]
    )  # one point per cell, as in Pointcept
    point = {"coord": coord, "grid_coord": cells, "feat": coord.repeat(1, 4), "offset": torch.tensor([len(cells)])}

    order = torch.argsort(z_order(cells))
    here = int((coord - torch.tensor([0.0, 0.1, 0.25])).norm(dim=1).argmin())  # on the flank
    first = int((order == here).nonzero()) // PATCH * PATCH
    serialized, dirac = torch.zeros(2, len(cells))
    serialized[order[first : first + PATCH]] = 1 / PATCH
    dirac[here] = 1
    layer = QSerializedAttention(12, 1, content_dim=0, sigma_range=(3.0, 3.0))
    with torch.no_grad():
        diffused = (layer.attention.weights(point["feat"][None], cells[None].float()) @ dirac)[0, 0]
        moved = layer(point)["feat"]
    print(f"features {tuple(moved.shape)} at the cells of {options.points:,} points")
    picture = figure(11, 4.5)
    view, _ = camera_view(coord, coord)
    facing = facing_normals(view)
    titles = f"a patch of {PATCH} points by z-order", "Q, σ = 3 cells"
    for axis, weights, title in zip(picture.subplots(1, 2), (serialized, diffused), titles, strict=True):
        scatter(axis, view, facing, heat(weights), 30_000 / len(view), title=title)
    picture.savefig(options.output, dpi=80)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
