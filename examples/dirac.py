"""A Dirac diffuses over a creature: the whole idea of qattn in forty lines.

A Gaussian kernel K between points, with masses m, becomes a diffusion Q = Λ K M Λ once a potential f, Λ = diag(e^f),
makes its rows sum to one. A row of Q is a row of softmax attention, so the log-sum-exp of attention is all that
finding f takes, and attention itself applies Q. Neither ever forms the N × N matrix.
"""

import argparse
import math
import time

import matplotlib.pyplot as plt
import torch
from shapes import creature

from qattn import attend


def normalise(points, log_mass, passes=16):
    """The potential f with Σ_j e^{f_i} K_ij m_j e^{f_j} = 1, by averaging f and −lse(f + log m)."""
    f = torch.zeros_like(log_mass)
    for _ in range(passes):
        f = 0.5 * (f - attend(points, points, bias=f + log_mass).lse)
    return f


def diffuse(points, log_mass, f, signal):
    """Q v = exp(f + lse) · out, with the bias f + log m."""
    out, lse = attend(points, points, signal, bias=f + log_mass)
    return torch.exp(f + lse)[:, None] * out


def draw(axis, points, normals, density, title):
    """Points seen from the side and a little above, the near ones last, shaded by their normals."""
    turn, tilt = math.radians(-35), math.radians(15)
    around = torch.tensor([[math.cos(turn), 0, -math.sin(turn)], [0, 1, 0], [math.sin(turn), 0, math.cos(turn)]])
    down = torch.tensor([[1, 0, 0], [0, math.cos(tilt), -math.sin(tilt)], [0, math.sin(tilt), math.cos(tilt)]])
    view, facing = points @ (down @ around).T, normals @ (down @ around).T
    front = facing[:, 2] > -0.2
    order = torch.argsort(view[:, 2][front])
    light = (0.45 + 0.6 * (facing @ torch.tensor([0.35, 0.65, 0.68])).clamp(min=0))[:, None]
    level = (torch.log10(density / density.max() + 1e-9) / 3 + 1).clamp(0, 1)[:, None]  # three decades
    heat = torch.from_numpy(plt.colormaps["YlOrRd"](0.15 + 0.85 * level[:, 0].numpy())[:, :3]).float()
    colours = ((1 - level.sqrt()) * torch.tensor([0.80, 0.82, 0.86]) + level.sqrt() * heat) * light
    axis.scatter(*view[front][order, :2].T, c=colours[front][order].clamp(0, 1), s=14, linewidths=0)
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=15)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--sigma", type=float, default=0.05)
    parser.add_argument("--output", default="dirac.png")
    options = parser.parse_args()

    points, normals = creature(options.points)
    N = len(points)
    scaled, log_mass = points / options.sigma, torch.full((N,), -math.log(N))

    attend(scaled[:100], scaled[:100], points[:100])  # compiles the loop, once for all
    start = time.perf_counter()
    f = normalise(scaled, log_mass)
    solved = time.perf_counter() - start

    source = int(torch.argmax(points[:, 0]))  # the tip of the nose
    density = torch.zeros(N, 1)
    density[source] = N  # a Dirac of mass 1
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.9), layout="constrained")
    print(f"{N} points, sigma {options.sigma}: 16 passes in {solved:.2f} s, {solved / 16 / N**2 * 1e9:.2f} ns a pair")
    print(f"{'steps':>6} {'mass':>8} {'smallest':>9} {'Q1 - 1':>8}")
    done = 0
    for axis, steps in zip(axes, (1, 8, 32, 128), strict=True):
        for _ in range(steps - done):
            density = diffuse(scaled, log_mass, f, density)
        done = steps
        row_error = (diffuse(scaled, log_mass, f, torch.ones(N, 1)) - 1).abs().mean()
        print(f"{steps:6d} {float(density.mean()):8.5f} {float(density.min()):9.1e} {float(row_error):8.1e}")
        draw(axis, points, normals, density[:, 0], f"$Q^{{{steps}}}\\delta$")
    figure.savefig(options.output, dpi=110)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
