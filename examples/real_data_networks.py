"""Networks from a `Batch` to scores of labels (B, N, K): ours, and plain versions of what is in use.

| row | what it is |
|---|---|
| QPointTransformer | attention by diffusion at every level of a U |
| QPointTransformer, … | the same without one of its parts |
| QDiffNet | blocks of diffusion at all points |
| softmax | a transformer: global softmax attention between all points |
| vector attention | Point Transformer (Zhao et al. 2021): a U, attention by channels over 16 neighbors |
| PointNet++ | set abstraction in balls and feature propagation (Qi et al. 2017, single scale) |
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from qattn.nn import QDiffNet, QPointTransformer

CELLS = 3  # spacings in the edge of the finest cells of QPointTransformer
WITHOUT = {  # the rows that take something away, and how
    "QPointTransformer, row softmax": {"normalization": "row"},
    "QPointTransformer, no content": {"content_dim": 0},
    "QPointTransformer, no masses": {},
    "QPointTransformer, no gradients": {"gradient_dim": 0},
}


class WithMasses(nn.Module):
    """A network of qattn, with masses by density or with equal ones."""

    def __init__(self, network, is_given):
        super().__init__()
        self.network, self.is_given = network, is_given

    def forward(self, batch):
        return self.network(batch.features, batch.points, batch.mass if self.is_given else None)


class Softmax(nn.Module):
    """A transformer whose points attend to all others; positions are in the features alone."""

    def __init__(self, in_channels, out_channels, width=64, num_heads=4, num_blocks=4):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(in_channels, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(SoftmaxBlock(width, num_heads) for _ in range(num_blocks))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out_channels))

    def forward(self, batch):
        x = self.first(batch.features)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class SoftmaxBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.project(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, H, C)
        attended = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # (B, H, N, C)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


def gathered(x, index):
    """Rows (B, N', …, C) of x (B, N, C) at indices (B, N', …)."""
    batch = torch.arange(len(x)).view(-1, *(index.ndim - 1) * [1])
    return x[batch, index]


class Norm(nn.BatchNorm1d):
    """Batch normalization of the last axis, whatever axes are before it."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


def dense(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False), Norm(outputs), nn.ReLU()


class VectorAttention(nn.Module):
    """Σ_j softmax_j(γ(φ(x_i) − ψ(x_j) + δ_ij)) (α(x_j) + δ_ij), a weight for each 8 channels, over near points j."""

    def __init__(self, width, shared=8):
        super().__init__()
        self.shared = shared
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.position = nn.Sequential(nn.Linear(3, 3, bias=False), Norm(3), nn.ReLU(), nn.Linear(3, width))
        few = width // shared
        self.weight = nn.Sequential(Norm(width), nn.ReLU(), *dense(width, few), nn.Linear(few, few))

    def forward(self, x, points, near):
        delta = self.position(gathered(points, near) - points[:, :, None])  # (B, N, k, C)
        weight = self.weight(self.query(x)[:, :, None] - gathered(self.key(x), near) + delta).softmax(2)
        value = gathered(self.value(x), near) + delta
        return (weight[..., None, :] * value.unflatten(-1, (self.shared, -1))).sum(2).flatten(-2)


class VectorBlock(nn.Module):
    """The residual block of Point Transformer."""

    def __init__(self, width):
        super().__init__()
        self.before, self.attention = nn.Sequential(*dense(width, width)), VectorAttention(width)
        self.after = nn.Sequential(Norm(width), nn.ReLU(), nn.Linear(width, width, bias=False), Norm(width))

    def forward(self, x, points, near):
        return torch.relu(x + self.after(self.attention(self.before(x), points, near)))


class PointTransformer(nn.Module):
    """A U of blocks of vector attention, on farthest points and 16 neighbors, with interpolation on the way back."""

    def __init__(self, in_channels, out_channels, widths=(32, 48, 96, 96)):
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = nn.Sequential(*dense(in_channels, widths[0]))
        self.encoder = nn.ModuleList(VectorBlock(width) for width in widths)
        self.down = nn.ModuleList(nn.Sequential(*dense(3 + fine, coarse)) for fine, coarse in pairs)
        self.up = nn.ModuleList(nn.Sequential(*dense(coarse, fine)) for fine, coarse in pairs)
        self.skip = nn.ModuleList(nn.Sequential(*dense(fine, fine)) for fine, _ in pairs)
        self.decoder = nn.ModuleList(VectorBlock(fine) for fine, _ in pairs)
        self.last = nn.Sequential(*dense(widths[0], widths[0]), nn.Linear(widths[0], out_channels))

    def forward(self, batch):
        levels, points = batch.neighbors, batch.points
        x, passed = self.first(batch.features), []
        for depth, level in enumerate(levels):
            x = self.encoder[depth](x, points, level.near)
            if depth == len(levels) - 1:
                break
            passed.append((x, points))
            near, centers = gathered(level.near, level.kept), gathered(points, level.kept)  # (B, N', k), (B, N', 3)
            offsets = gathered(points, near) - centers[:, :, None]
            x = self.down[depth](torch.cat([offsets, gathered(x, near)], dim=-1)).amax(2)
            points = centers
        for depth in reversed(range(len(levels) - 1)):
            finer, points = passed[depth]
            x = self.skip[depth](finer) + interpolated(self.up[depth](x), levels[depth])
            x = self.decoder[depth](x, points, levels[depth].near)
        return self.last(x)


def interpolated(x, level):
    """Features (B, N, C) from those of three points of the next level (B, N', C)."""
    return (level.share[..., None] * gathered(x, level.up)).sum(2)


class PointNet2(nn.Module):
    """Set abstraction in balls about farthest points, and feature propagation back; single scale."""

    def __init__(self, in_channels, out_channels, widths=(32, 72, 144, 288)):
        super().__init__()
        first, *others = widths
        self.abstractions, self.propagations = nn.ModuleList(), nn.ModuleList()
        sizes = [in_channels, *others]
        for fine, coarse in zip(sizes, others, strict=False):
            half = coarse // 2
            layers = *dense(3 + fine, half), *dense(half, half), *dense(half, coarse)
            self.abstractions.append(nn.Sequential(*layers))
        width = others[-1]
        for fine, out in zip(sizes[-2::-1], [*others[-2::-1], first], strict=True):
            self.propagations.append(nn.Sequential(*dense(width + fine, out), *dense(out, out)))
            width = out
        self.last = nn.Sequential(*dense(first, first), nn.Dropout(0.5), nn.Linear(first, out_channels))

    def forward(self, batch):
        x, points, passed = batch.features, batch.points, []
        for layers, level in zip(self.abstractions, batch.balls, strict=True):
            passed.append((x, level))
            centers = gathered(points, level.kept)
            offsets = gathered(points, level.near) - centers[:, :, None]
            x = layers(torch.cat([offsets, gathered(x, level.near)], dim=-1)).amax(2)
            points = centers
        for layers, (finer, level) in zip(self.propagations, reversed(passed), strict=True):
            x = layers(torch.cat([finer, interpolated(x, level)], dim=-1))
        return self.last(x)


def q_point_transformer(in_channels, out_channels, spacing, **options):
    sizes = {"preset": "tiny", "widths": (32, 64, 96), "num_heads": (4, 8, 12)}
    return QPointTransformer(in_channels, out_channels, spacing=CELLS * spacing, **sizes, **options)


def q_diff_net(in_channels, out_channels, spacing):
    sizes = {"num_scales": 4, "channels_per_scale": 24, "num_blocks": 3}
    return QDiffNet(in_channels, out_channels, sigma_range=(2 * spacing, 0.5), learn_sigma=False, **sizes)


def made(row, in_channels, out_channels, spacing):
    """The network of a row, for samples whose nearest points are `spacing` apart on average."""
    if row.startswith("QPointTransformer"):
        network = q_point_transformer(in_channels, out_channels, spacing, **WITHOUT.get(row, {}))
        return WithMasses(network, row != "QPointTransformer, no masses")
    if row == "QDiffNet":
        return WithMasses(q_diff_net(in_channels, out_channels, spacing), True)
    peers = {"softmax": Softmax, "vector attention": PointTransformer, "PointNet++": PointNet2}
    return peers[row](in_channels, out_channels)


ROWS = "QPointTransformer", "softmax", "vector attention", "PointNet++", "QDiffNet", *WITHOUT
