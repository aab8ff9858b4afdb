"""Convergence of symmetric Sinkhorn, on the inputs of the paper's appendix E.

The mass-weighted mean of |Q1 − 1| after each kernel pass: surface and volume of a shape as clouds and as voxels,
Erdős–Rényi graphs (p = 0.2) and geometric graphs (r = 0.15 in the unit square). Dashed lines are the paper's averaging,
solid ones Chebyshev's iteration, the default here.
"""

import argparse
import statistics

import torch
from claims import parsed, report

import qattn
from qattn.pictures import figure
from qattn.shapes import creature, creature_distance, creature_inside

SIGMA = 0.05


def shapes(points):
    """A surface and a volume, as clouds of points and as voxels of edge σ."""
    x, y, z = (torch.arange(low, high, SIGMA) for low, high in ((-1.1, 1.1), (-0.8, 0.9), (-0.4, 0.4)))
    distance = creature_distance(torch.stack(torch.meshgrid(x, y, z, indexing="ij"), dim=-1))
    shell, solid = distance.abs() < 0.6 * SIGMA, distance < 0
    return {
        "surface cloud": (qattn.GaussianKernel(creature(points)[0], SIGMA), None),
        "volume cloud": (qattn.GaussianKernel(creature_inside(points), SIGMA), None),
        "shell of voxels": (qattn.VoxelKernel(shell, SIGMA, SIGMA), qattn.mass.voxel_density(shell)),
        "solid of voxels": (qattn.VoxelKernel(solid, SIGMA, SIGMA), None),
    }


def random_graphs(sizes):
    """Draw graphs whose pairs of vertices are joined with the probability 0.2."""
    generator = torch.Generator().manual_seed(0)
    upper = {n: torch.triu(torch.rand(n, n, generator=generator) < 0.2, 1).float() for n in sizes}
    return {f"N = {n}": (qattn.GraphKernel(a + a.T, eps=1e-6), None) for n, a in upper.items()}


def geometric_graphs(sizes):
    """Points of the unit square, joined within a distance of 0.15."""
    generator = torch.Generator().manual_seed(0)
    points = {n: torch.rand(n, 2, generator=generator) for n in sizes}
    near = {n: ((torch.cdist(x, x) < 0.15) & ~torch.eye(n, dtype=torch.bool)).float() for n, x in points.items()}
    return {f"N = {n}": (qattn.GraphKernel(a, eps=1e-6), None) for n, a in near.items()}


def errors(kernel, mass, iteration):
    """The mean |Q1 − 1| at the start, and after each pass."""
    result = qattn.sinkhorn(kernel, mass, tol=1e-5, solver=qattn.Solver(max_iter=100, iteration=iteration))
    return [float(error) for error in result.history]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--output", default="convergence.png")
    options = parsed(parser, points=500, sizes=[100, 200])

    panels = {
        "a shape": shapes(options.points),
        "Erdős–Rényi graphs, p = 0.2": random_graphs(options.sizes),
        "geometric graphs, r = 0.15": geometric_graphs(options.sizes),
    }
    picture = figure(14, 4)
    axes = picture.subplots(1, 3, sharey=True)
    firsts, counts = [], []
    print(f"{'':46} {'after one':>10} {'updates to 1e-3':>22}")
    print(f"{'':38} {'sites':>7} {'update':>10} {'averaging':>12} {'Chebyshev':>9}")
    for axis, (title, inputs) in zip(axes, panels.items(), strict=True):
        for number, (name, (kernel, mass)) in enumerate(inputs.items()):
            curves = {iteration: errors(kernel, mass, iteration) for iteration in ("plain", "chebyshev")}
            updates = [next(n for n, error in enumerate(curve) if error <= 1e-3) for curve in curves.values()]
            first = curves["plain"][1]
            firsts.append(first)
            counts.append(updates)
            row = f"{title.split(',')[0]}, {name}"
            print(f"{row:38} {kernel.shape[-1]:7,} {first:10.1%} {updates[0]:12d} {updates[1]:9d}", flush=True)
            for (iteration, curve), style in zip(curves.items(), ("--", "-"), strict=True):
                label = name if iteration == "chebyshev" else None
                axis.semilogy(range(1, len(curve)), curve[1:], style, color=f"C{number}", label=label)
        axis.axhline(1e-3, color="0.6", lw=0.8)
        axis.set(title=title, xlabel="updates of the potential", ylim=(1e-5, 1))
        axis.legend(frameon=False)
    axes[0].set_ylabel("mean |Q1 − 1|")
    picture.savefig(options.output, dpi=110)
    print(f"wrote {options.output}")

    plain, ours = zip(*counts, strict=True)
    usual = statistics.median(firsts)
    report(
        (
            "5 to 10 updates leave less than 1e-3",
            f"{min(plain)} to {max(plain)} updates by averaging, {min(ours)} to {max(ours)} by Chebyshev's iteration",
            max(plain) <= 10 and all(few <= many for many, few in counts),
        ),
        (
            "one update, the usual normalization, leaves 1 to 5%",
            f"{min(firsts):.1%} to {max(firsts):.1%}, {usual:.1%} in the median",
            0.01 <= usual <= 0.05 and min(firsts) >= 0.005 and max(firsts) <= 0.08,
        ),
    )


if __name__ == "__main__":
    main()
