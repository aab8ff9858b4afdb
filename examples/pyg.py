"""A network of PyG whose `PointTransformerConv` is replaced by `QAttention`: the diff is two lines.

    -   self.convs = nn.ModuleList(PointTransformerConv(width, width) for _ in range(num_blocks))
    +   self.convs = nn.ModuleList(QAttention(width, 8, content_dim=4, sigma_range=SIGMA) for _ in range(num_blocks))
    …
    -   x = x + conv(norm(x), data.pos, data.edge_index)
    +   x = x + conv(norm(x), data.pos, batch=data.batch)

Both are trained on the parts of animals, in batches of `torch_geometric.data.Data`, for as many steps, and tested on
animals with 4 times as many points. The first needs a graph of neighbors, whose reach shrinks as points get denser.
The second needs none. Needs `pip install torch_geometric`.
"""

import argparse
import time
from abc import ABC, abstractmethod

import torch
from quick import parsed
from scipy.spatial import cKDTree
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import PointTransformerConv

from qattn.nn import QAttention
from qattn.pictures import camera_view, colormap, facing_normals, figure, scatter
from qattn.shapes import CREATURE_PARTS, creature, creature_parts, posed

SIGMA = 0.06, 0.4  # from two spacings of 1,000 points on
NEIGHBORS = 16
TESTING = 10**6  # the first seed of animals to test on


class Network(nn.Module, ABC):
    """Residual blocks of a convolution and an MLP, as users of PyG write them."""

    def __init__(self, width, num_blocks):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, len(CREATURE_PARTS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.convs = self.made(width, num_blocks)

    @abstractmethod
    def made(self, width, num_blocks):
        """The convolutions."""

    @abstractmethod
    def convolved(self, conv, x, data):
        """Features (N, width) after one of them."""

    def forward(self, data):
        x = self.first(data.x)
        for norm, conv, mlp in zip(self.norms, self.convs, self.mlps, strict=True):
            x = x + self.convolved(conv, norm(x), data)
            x = x + mlp(x)
        return self.last(x)


class WithPointTransformerConv(Network):
    """The network before, with PyG's layers."""

    def made(self, width, num_blocks):
        return nn.ModuleList(PointTransformerConv(width, width) for _ in range(num_blocks))

    def convolved(self, conv, x, data):
        return conv(x, data.pos, data.edge_index)


class WithQAttention(Network):
    """The network after, with ours."""

    def made(self, width, num_blocks):
        return nn.ModuleList(QAttention(width, 8, content_dim=4, sigma_range=SIGMA) for _ in range(num_blocks))

    def convolved(self, conv, x, data):
        return conv(x, data.pos, batch=data.batch)


def animal(num_points, seed):
    """The points of an animal in a random pose, their parts, and edges from the nearest to each."""
    rest, _ = creature(num_points, seed)
    pos = posed(rest, seed)
    near = torch.from_numpy(cKDTree(pos).query(pos, NEIGHBORS + 1)[1][:, 1:])  # (N, k): without the point itself
    edge_index = torch.stack([near.flatten(), torch.arange(num_points).repeat_interleave(NEIGHBORS)])
    return Data(x=pos, pos=pos, y=creature_parts(rest), edge_index=edge_index)


def trained(network, options):
    """The network after some steps, and their seconds."""
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
    seconds = 0.0
    for step in range(options.steps):
        seeds = range(step * options.batch, (step + 1) * options.batch)
        data = Batch.from_data_list([animal(options.points, seed) for seed in seeds])
        start = time.process_time()
        loss = nn.functional.cross_entropy(network(data), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - start
    return network.eval(), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1000, help="of an animal to train on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="animals a step")
    parser.add_argument("--animals", type=int, default=5, help="to test on")
    parser.add_argument("--output", default="pyg.png")
    options = parsed(parser, points=100, steps=3, animals=1)

    picture = figure(12, 4)
    axes = picture.subplots(1, 3)
    for column, kind in enumerate((WithPointTransformerConv, WithQAttention), start=1):
        torch.manual_seed(0)
        network, seconds = trained(kind(64, 3), options)
        right = {}
        for count in (options.points, 4 * options.points):
            with torch.no_grad():
                tests = [animal(count, TESTING + i) for i in range(options.animals)]
                found = [network(data).argmax(-1) for data in tests]
            right[count] = (
                100 * torch.stack([(f == d.y).float().mean() for f, d in zip(found, tests, strict=True)]).mean()
            )
        accuracies = ", ".join(f"{value:.1f} % on {count:,} points" for count, value in right.items())
        size = sum(parameter.numel() for parameter in network.parameters())
        print(
            f"{kind.__name__}: {accuracies}; {size:,} parameters, {seconds:.0f} s for {options.steps} steps", flush=True
        )
        view, _ = camera_view(tests[0].pos, tests[0].pos)
        for at, labels in ((0, tests[0].y), (column, found[0])):
            colors = colormap("tab10", labels / 9)
            title = kind.__name__ if at else f"parts, {len(view):,} points"
            axes[at].clear()
            scatter(axes[at], view, facing_normals(view), colors, 15_000 / len(view), title=title)
    picture.savefig(options.output, dpi=80)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
