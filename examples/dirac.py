"""A Dirac diffuses over a creature.

A Gaussian kernel between 20,000 points becomes a diffusion operator Q by symmetric Sinkhorn normalization, which takes
a few passes of attention; every application is one more. The mass stays, nothing becomes negative, and no N × N matrix
is formed.
"""

import argparse
import time

import torch
from quick import parsed

import qattn
from qattn.pictures import camera_view, figure, heat, scatter
from qattn.shapes import creature


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--sigma", type=float, default=0.05)
    parser.add_argument("--output", default="dirac.png")
    options = parsed(parser, points=1000, sigma=0.1)

    points, normals = creature(options.points)
    N = len(points)
    qattn.diffusion(points[:100], options.sigma) @ points[:100]  # compiles the loop, once for all
    start = time.perf_counter()
    q = qattn.diffusion(points, options.sigma, tol=1e-5)
    print(f"{q}\nnormalized in {time.perf_counter() - start:.2f} s, {q.num_iter} passes")

    dirac = torch.zeros(N)
    dirac[points[:, 0].argmax()] = N  # mass 1 on the tip of the nose
    density, done = dirac, 0
    picture = figure(16, 3.9)
    print(f"{'steps':>6} {'mass':>9} {'smallest':>9} {'largest':>9}")
    for axis, steps in zip(picture.subplots(1, 4), (1, 8, 32, 128), strict=True):
        density, done = q.power(steps - done, density), steps
        print(f"{steps:6d} {float(density.mean()):9.6f} {float(density.min()):9.1e} {float(density.max()):9.1e}")
        scatter(
            axis, *camera_view(points, normals), heat(density), size=28 * 20_000 / N, title=f"$Q^{{{steps}}}\\delta$"
        )
    picture.savefig(options.output, dpi=110)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
