"""A million points, at every bandwidth: noise on a surface, diffused at five scales.

Small bandwidths go by tiles that are near enough to matter, large ones by non-uniform FFTs; `method="auto"` chooses,
and each operator measures its own error against exact rows.
"""

import argparse
import resource
import time

import torch
from quick import parsed

import qattn
from qattn.pictures import figure, render, show
from qattn.shapes import creature


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.004, 0.01, 0.03, 0.1, 0.3])
    parser.add_argument("--output", default="million_points.png")
    options = parsed(parser, points=20_000, sigmas=[0.03, 0.3])

    print(f"Spreading {options.points:,} points over a creature ...", flush=True)
    points, normals = creature(options.points)
    noise = torch.randn(len(points), 3, generator=torch.Generator().manual_seed(0))
    for method in ("exact", "tiles", "fourier"):  # compiles the loops, once for all
        qattn.diffuse(points[:1000], 0.3, noise[:1000], method=method)

    print(f"{'sigma':>7} {'method':>8} {'passes':>7} {'|Q1 - 1|':>9} {'row error':>10} {'seconds':>8} {'peak MB':>8}")
    picture = figure(4 * len(options.sigmas), 3.6)
    axes = picture.subplots(1, len(options.sigmas), squeeze=False)[0]
    for axis, sigma in zip(axes, options.sigmas, strict=True):
        start = time.perf_counter()
        smooth, q = qattn.diffuse(points, sigma, noise)
        took = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = [int(q.num_iter), float(q.marginal_error), float(q.kernel_error()), took, peak]
        print(
            f"{sigma:7g} {q.kernel.method:>8} {'{:7d} {:9.1e} {:10.1e} {:8.2f} {:8.0f}'.format(*figures)}", flush=True
        )
        smooth = smooth - smooth.mean(0)
        image = render(points, normals, 0.5 + smooth / (5 * smooth.std(0)))
        show(axis, image, f"σ = {sigma:g}   {q.kernel.method}, {took:.1f} s")
    print(f"\n{q.kernel}")
    picture.savefig(options.output, dpi=90)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
