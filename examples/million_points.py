"""A million points, at every bandwidth: noise on a surface, diffused at five scales.

Small bandwidths go by tiles that are near enough to matter, large ones by non-uniform FFTs; `method="auto"` chooses,
and each operator measures its own error against exact rows.
"""

import argparse
import resource
import time

import matplotlib.pyplot as plt
import torch
from picture import render

import qattn
from qattn.shapes import creature


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.004, 0.01, 0.03, 0.1, 0.3])
    parser.add_argument("--output", default="million_points.png")
    options = parser.parse_args()

    print(f"Spreading {options.points:,} points over a creature ...", flush=True)
    points, normals = creature(options.points)
    noise = torch.randn(len(points), 3, generator=torch.Generator().manual_seed(0))
    for method in ("exact", "tiles", "fourier"):  # compiles the loops, once for all
        qattn.diffusion(points[:1000], 0.3, method=method, signal=noise[:1000])

    print(f"{'sigma':>7} {'method':>8} {'passes':>7} {'|Q1 - 1|':>9} {'row error':>10} {'seconds':>8} {'peak MB':>8}")
    figure, axes = plt.subplots(1, len(options.sigmas), figsize=(4 * len(options.sigmas), 3.6), layout="constrained")
    for axis, sigma in zip(axes, options.sigmas, strict=True):
        start = time.perf_counter()
        q = qattn.diffusion(points, sigma, signal=noise)
        took = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = [int(q.num_iter), float(q.marginal_error), float(q.error()), took, peak]
        print(
            f"{sigma:7g} {q.kernel.method:>8} {'{:7d} {:9.1e} {:10.1e} {:8.2f} {:8.0f}'.format(*figures)}", flush=True
        )
        smooth = q.applied - q.applied.mean(0)
        axis.imshow(render(points, normals, 0.5 + smooth / (5 * smooth.std(0))))
        axis.set_title(f"σ = {sigma:g}   {q.kernel.method}, {took:.1f} s", fontsize=13)
        axis.axis("off")
    print(f"\n{q.kernel}")
    figure.savefig(options.output, dpi=90)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
