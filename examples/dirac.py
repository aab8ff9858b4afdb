"""A Dirac diffuses over a creature.

A Gaussian kernel between 20,000 points becomes a diffusion operator Q by symmetric Sinkhorn normalisation, which takes
a few passes of attention; every application is one more. The mass stays, nothing becomes negative, and no N × N matrix
is formed.
"""

import argparse
import time

import matplotlib.pyplot as plt
import torch
from picture import light, seen

import qattn
from qattn.shapes import creature


def draw(axis, points, normals, density, title):
    """Points seen from the side and a little above, the near ones last, shaded by their normals."""
    view, facing = seen(points, normals)
    front = facing[:, 2] > -0.2
    order = torch.argsort(view[:, 2][front])
    level = (torch.log10(density / density.max() + 1e-9) / 3 + 1).clamp(0, 1)[:, None]  # three decades
    heat = torch.from_numpy(plt.colormaps["YlOrRd"](0.15 + 0.85 * level[:, 0].numpy())[:, :3]).float()
    colours = ((1 - level.sqrt()) * torch.tensor([0.80, 0.82, 0.86]) + level.sqrt() * heat) * light(facing)
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
    qattn.diffusion(points[:100], options.sigma) @ points[:100]  # compiles the loop, once for all
    start = time.perf_counter()
    q = qattn.diffusion(points, options.sigma, tol=1e-5)
    print(f"{q}\nnormalised in {time.perf_counter() - start:.2f} s, {q.num_iter} passes")

    dirac = torch.zeros(N)
    dirac[points[:, 0].argmax()] = N  # mass 1 on the tip of the nose
    density, done = dirac, 0
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.9), layout="constrained")
    print(f"{'steps':>6} {'mass':>9} {'smallest':>9} {'largest':>9}")
    for axis, steps in zip(axes, (1, 8, 32, 128), strict=True):
        density, done = q.power(steps - done, density), steps
        print(f"{steps:6d} {float(density.mean()):9.6f} {float(density.min()):9.1e} {float(density.max()):9.1e}")
        draw(axis, points, normals, density, f"$Q^{{{steps}}}\\delta$")
    figure.savefig(options.output, dpi=110)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
