"""Parts of animals, learned from evenly sampled ones and asked for on finer and on uneven samples.

Animals of 1,000 points in random poses, turned about the vertical, have seven parts to be told apart by coordinates
alone. Four networks of about the same size see the same batches: `QDiffNet` and a stack of `QBlock`s, whose operators
take masses by kernel density; a PointNet (an MLP at each point, the maximum over all, another MLP); and a transformer
with softmax attention. They are tested on new animals of as many points, of ten times as many, and of points ten times
as dense at one end of the body as at the other.
"""

import argparse
import math
import time
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from quick import parsed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention
from tqdm import tqdm

import qattn
from qattn.nn import QBlock, QDiffNet
from qattn.pictures import camera_view, light
from qattn.shapes import CREATURE_PARTS, creature, creature_parts, posed

K = len(CREATURE_PARTS)
COLORS = torch.tensor(
    [[72, 76, 82], [98, 78, 30], [87, 33, 31], [45, 72, 37], [30, 52, 80], [63, 44, 77], [96, 55, 70]]
).div(100)
POSE = {"bend": 0.5, "stretch": 0.15}
TESTING = 2 * 10**6  # the first seed of animals to test on; those to train on start from 0
SIGMA = (0.05, 0.5)  # the spacing of 1,000 points, and half of a shape's radius
RATES = {"QDiffNet": 1e-2, "QBlock": 3e-3, "PointNet": 1e-2, "softmax": 1e-2}  # the better of 3e-3 and 1e-2


class Animal(NamedTuple):
    """Points (N, 3) in the unit ball, their parts and masses (N,), normals (N, 3), and the rotation that turned it."""

    points: Tensor
    parts: Tensor
    mass: Tensor
    normals: Tensor
    turn: Tensor


def animal(n, seed, contrast=1.0):
    """An animal with a pose and a sample of its own, `contrast` times as dense at one end as at the other."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * float(torch.rand((), generator=generator))
    c, s = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    rest, normals = creature(n if contrast == 1 else 8 * n, seed)
    if contrast != 1:
        x = rest[:, 0]
        along = (x - x.min()) / (x.max() - x.min())
        kept = torch.multinomial(contrast ** (along if seed % 2 else 1 - along), n, generator=generator)
        rest, normals = rest[kept], normals[kept]
    points = posed(rest, seed, **POSE) @ turn.T
    points = points - (points.amin(0) + points.amax(0)) / 2  # unlike the mean, the same for all densities
    points = points / points.norm(dim=-1).max()
    mass = qattn.mass.density(points, sigma=0.1)  # two spacings, for every sample: what it sees of the shape stays
    return Animal(points, creature_parts(rest), mass, posed_normals(rest, normals, seed) @ turn.T, turn)


def posed_normals(rest, normals, seed):
    """Normals where a pose has taken the points: across the images of two tangents."""
    first = normalize(torch.linalg.cross(normals, torch.eye(3)[normals.abs().argmin(-1)]), dim=-1)
    second = torch.linalg.cross(normals, first)
    here, there, beside = (posed(rest + 1e-3 * step, seed, **POSE) for step in (0 * first, first, second))
    return normalize(torch.linalg.cross(there - here, beside - here), dim=-1)


class Blocks(nn.Module):
    """Transformer blocks between two linear layers; each is called with features, points, masses and `options`."""

    def __init__(self, width, blocks):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, K))
        self.blocks = nn.ModuleList(blocks)

    def options(self, points, mass):
        return {}

    def forward(self, features, points, mass):
        x, options = self.first(features), self.options(points, mass)
        for block in self.blocks:
            x = block(x, points, mass, **options)
        return self.last(x)


class QBlocks(Blocks):
    """Blocks that start from the potentials of the first."""

    def options(self, points, mass):
        return {"warm_start": self.blocks[0].attention.diffusion.operator(points, mass)}


class SoftmaxBlock(nn.Module):
    """x + attention(norm(x)) and then x + mlp(norm(x)), blind to points and masses."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, points, mass):
        qkv = self.project(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, C)
        attended = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # (B, H, N, C)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class PointNet(nn.Module):
    """An MLP at each point, the maximum over all, and another MLP on both."""

    def __init__(self, width=64, pooled=192):
        super().__init__()
        self.local = nn.Sequential(*dense(3, width), *dense(width, width))
        self.pooled = nn.Sequential(nn.Linear(width, pooled), nn.BatchNorm1d(pooled))
        self.last = nn.Sequential(*dense(width + pooled, 2 * width), *dense(2 * width, width), nn.Linear(width, K))

    def forward(self, features, points, mass):
        B, N, _ = features.shape
        x = self.local(features.flatten(0, 1))  # (B N, C)
        pooled = self.pooled(x).unflatten(0, (B, N)).amax(1)  # (B, C')
        return self.last(torch.cat([x, pooled.repeat_interleave(N, 0)], dim=-1)).unflatten(0, (B, N))


def dense(inputs, outputs):
    return nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()


def networks():
    """Networks of about 60,000 parameters, from features, points and masses to scores of parts (B, N, K)."""
    torch.manual_seed(0)
    bandwidths = {"sigma_range": SIGMA, "learn_sigma": False}  # on a CPU, learning them triples the time of a step
    return {
        "QDiffNet": QDiffNet(3, K, num_scales=8, num_blocks=3, num_hidden_layers=1, **bandwidths),
        "QBlock": QBlocks(48, (QBlock(48, 8, mlp_ratio=3, **bandwidths) for _ in range(3))),
        "PointNet": PointNet(),
        "softmax": Blocks(40, (SoftmaxBlock(40, 4) for _ in range(3))),
    }


def train(network, rate, steps):
    """A function that takes one step on points (B, N, 3), parts (B, N) and masses (B, N)."""
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)

    def step(points, parts, mass):
        loss = cross_entropy(network(points, points, mass).flatten(0, 1), parts.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


@torch.no_grad()
def predicted(network, animal, mass):
    """The most likely parts (N,)."""
    return network(animal.points[None], animal.points[None], mass[None])[0].argmax(-1)


def scores(parts, found):
    """The share of points that are right, and the mean over parts of intersection over union."""
    count = torch.bincount(K * parts + found, minlength=K * K).view(K, K).float()
    both, either = count.diagonal(), count.sum(0) + count.sum(1) - count.diagonal()
    return torch.stack([both.sum() / count.sum(), (both / either)[either > 0].mean()])


def draw(axis, animal, parts, title):
    """Points by part, as they stood before they were turned, each as large as the area that it stands for."""
    view, facing = camera_view(animal.points @ animal.turn, animal.normals @ animal.turn)
    order = torch.argsort(view[:, 2])
    order = order[facing[order, 2] > -0.2]  # the near ones last
    colors = (COLORS[parts] * light(facing)).clamp(0, 1)
    axis.scatter(*view[order, :2].T, c=colors[order], s=9e4 * animal.mass[order], linewidths=0, clip_on=False)
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=14)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1000, help="of an animal to train on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=2, help="animals a step")
    parser.add_argument("--animals", type=int, default=10, help="to test on, of each sampling")
    parser.add_argument("--output", default="segment.png")
    options = parsed(parser, points=200, steps=5, animals=2)

    trained, n = networks(), options.points
    steps = {name: train(network, RATES[name], options.steps) for name, network in trained.items()}
    seconds = dict.fromkeys(trained, 0.0)
    for number in tqdm(range(options.steps), desc="training", unit=" steps"):
        seeds = range(number * options.batch, (number + 1) * options.batch)  # no animal is seen twice
        points, parts, mass, *_ = map(torch.stack, zip(*(animal(n, seed) for seed in seeds), strict=True))
        for name, step in steps.items():
            start = time.perf_counter()
            step(points, parts, mass)
            seconds[name] += time.perf_counter() - start

    samplings = {f"{n:,} points": (n, 1.0), f"{10 * n:,} points": (10 * n, 1.0), f"{n:,} uneven": (n, 10.0)}
    tests = {
        sampling: [animal(size, TESTING + i, contrast) for i in range(options.animals)]
        for sampling, (size, contrast) in samplings.items()
    }
    shown = list(tests)[1:]
    figure, axes = plt.subplots(len(shown), 1 + len(trained), figsize=(18, 7), layout="constrained")
    for row, sampling in zip(axes, shown, strict=True):
        draw(row[0], tests[sampling][0], tests[sampling][0].parts, sampling)

    print("accuracy, and mean over parts of intersection over union, on animals not seen before")
    print(f"{'':10} {'parameters':>10} {'rate':>6} {'seconds':>8} {'masses':>8}", *(f"{s:>14}" for s in tests))
    for column, (name, network) in enumerate(trained.items(), start=1):
        network.eval()
        size = sum(parameter.numel() for parameter in network.parameters())
        line = f"{name:10} {size:10,} {RATES[name]:6g} {seconds[name]:8.0f}"
        for masses in ("density", "equal") if name.startswith("Q") else ("",):
            print(f"{line:37} {masses:>8}", end="")
            for sampling, animals in tests.items():
                given = [torch.full_like(a.mass, 1 / len(a.mass)) if masses == "equal" else a.mass for a in animals]
                found = [predicted(network, a, mass) for a, mass in zip(animals, given, strict=True)]
                each = torch.stack([scores(a.parts, parts) for a, parts in zip(animals, found, strict=True)])
                print(" {:8.1%} {:5.2f}".format(*each.mean(0).tolist()), end="", flush=True)
                if sampling in shown and masses != "equal":
                    axis = axes[shown.index(sampling), column]
                    draw(axis, animals[0], found[0], f"{name}: {each[0, 0]:.0%}")
            line = ""
            print()
    dots = [plt.Line2D([], [], ls="", marker="o", ms=10, color=color) for color in COLORS.tolist()]
    figure.legend(dots, CREATURE_PARTS, loc="outside lower center", ncols=K, frameon=False, fontsize=14)
    figure.savefig(options.output, dpi=80)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
