"""How long do geodesic distances of a cloud take, and how far off are they, against potpourri3d's heat method?

Random points of the unit sphere and of a square with a round hole, whose distances are known, and the vertices of a
mesh of the creature, with distances along the mesh by fast marching on its faces, each split into 64. qattn takes σ = 4
mean distances of nearest neighbors and float32, normalizing included; potpourri3d triangulates neighborhoods and
factorizes two matrices, in float64. Both tell the time to set up, and that of each further source. Each runs in a
process of its own, so that its peak memory is its own. Needs the extras `bench` and `io`.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from _measure import finding, in_its_own_process, once, parsed, save

import qattn
from qattn import io
from qattn.distances import geodesic_distance
from qattn.tiles.when_to_compile import compile_at_first_call

sys.path.append(str(Path(__file__).parents[1] / "examples" / "paper"))

HOLE = 0.4
VERTICES = 5104  # of the mesh
LARGEST = {"sphere": 0.03, "square with a hole": 0.03, "creature": 0.08}  # errors of qattn


def sphere(n):
    x = qattn.shapes.sphere(n)
    return x, 2 * torch.asin(((x - x[0]).norm(dim=1) / 2).clamp(max=1))


def holed_square(n):
    x = 2 * torch.rand(2 * n, 2, generator=torch.Generator().manual_seed(0)) - 1
    x = x[x.norm(dim=1) > HOLE][:n]
    x[0] = torch.tensor([-0.9, 0.0])
    d = (x - x[0]).norm(dim=1)
    t = ((-x[0] * (x - x[0])).sum(1) / d.square().clamp(min=1e-12)).clamp(0, 1)
    closest = (x[0] + t[:, None] * (x - x[0])).norm(dim=1)
    a, b = x[0].norm(), x.norm(dim=1)
    angle = torch.acos(((x @ x[0]) / (a * b)).clamp(-1, 1))
    arc = angle - torch.acos(HOLE / a) - torch.acos((HOLE / b).clamp(max=1))
    bent = (a**2 - HOLE**2).sqrt() + (b**2 - HOLE**2).clamp(min=0).sqrt() + HOLE * arc
    return torch.nn.functional.pad(x, (0, 1)), torch.where((closest < HOLE) & (arc > 0), bent, d)


def creature(n):
    import trimesh
    from fem import creature_mesh
    from potpourri3d import MeshFastMarchingDistanceSolver

    mesh = points, _ = creature_mesh(round(math.sqrt(n / 2.9)))
    for _ in range(3):
        mesh = trimesh.remesh.subdivide(*mesh)  # which keeps vertices and appends those of edges
    exact = MeshFastMarchingDistanceSolver(*mesh).compute_distance([[(0, [])]])[: len(points)]
    return torch.from_numpy(points).float(), torch.from_numpy(exact)


SHAPES = {"sphere": sphere, "square with a hole": holed_square, "creature": creature}


def by_qattn(points):
    sigma = 4 * io.Cloud(points.numpy()).spacing
    q = qattn.diffusion(points, sigma)
    return lambda source: geodesic_distance(q, source).numpy()


def by_potpourri3d(points):
    from potpourri3d import PointCloudHeatSolver

    solver = PointCloudHeatSolver(points.double().numpy())
    return solver.compute_distance


CANDIDATES = {"qattn": by_qattn, "potpourri3d": by_potpourri3d}


@compile_at_first_call()
def one(name, shape, n):
    """Run one candidate in this process, and print a row."""
    points, exact = SHAPES[shape](n)
    CANDIDATES[name](SHAPES[shape](2000)[0])(0)  # imports and compiles everything
    compute, setup, megabytes = once(lambda: CANDIDATES[name](points))
    found, took, more = once(lambda: compute(0))
    away = exact > 0
    error = float((np.abs(found - exact.numpy()) / exact.numpy())[away].mean())
    assert name != "qattn" or error < LARGEST[shape]
    figures = {"setup": setup, "source": took, "seconds": setup + took, "megabytes": max(megabytes, more)}
    print(json.dumps({"name": name, "shape": shape, "N": n, **figures, "error": error}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a candidate may take")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parsed(parser, sizes=[5000])
    if options.one:
        name, shape, n = options.one
        return one(name, shape, int(n))

    print(__doc__.splitlines()[0])
    rows, cases = [], [(shape, n) for shape in SHAPES if shape != "creature" for n in options.sizes]
    cases.append(("creature", VERTICES))
    print("| shape | points | " + " | ".join(CANDIDATES) + " |\n" + "|---" * (2 + len(CANDIDATES)) + "|")
    for shape, n in cases:
        cells = []
        for name in CANDIDATES:
            row = in_its_own_process(__file__, "--one", name, shape, n, limit=options.limit)
            if isinstance(row, str) and name == "qattn":
                raise SystemExit(f"{name}: {row}")
            if isinstance(row, str):
                cells.append(row)
                continue
            rows.append(row)
            times = f"{row['setup']:.2f} s + {row['source']:.2f} s per source"
            cells.append(f"{times}, {row['megabytes']:,.0f} MB, error {row['error']:.1%}")
        print(f"| {shape} | {n:,} | {' | '.join(cells)} |", flush=True)
    ours = "{setup:.2f} s + {source:.2f} s, error {error:.1%}"
    findings = [
        finding(f"distances, {shape}, {n:,} points", ours, [r for r in rows if (r["shape"], r["N"]) == (shape, n)])
        for shape, n in cases
    ]
    save("distance", rows, findings, options.quick)


if __name__ == "__main__":
    main()
