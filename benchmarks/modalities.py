"""How long do mixtures, voxels and graphs take, in what memory, against dense torch, SciPy and clouds of their centers?

Each candidate builds its operator, normalizes to a mean |Q1 − 1| of 1e-3 and applies it to 8 channels, in a process of
its own, once, so that its peak memory is its own: what it needs above the imports and the data. Peers iterate as is
published, f ← ½ (f − log K e^f), and stop at the same error. The row error is that of the row sums at the potential
found, on 64 random rows, against all pairs in float64.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _measure import finding, in_its_own_process, once, parsed, save

import qattn
from qattn.tiles.when_to_compile import compile_at_first_call

CHANNELS, TOL = 8, 1e-3


# --- the data


def splats(n):
    """Discs on a sphere, each about as large as its share of it: means, log scales, quaternions, logits."""
    generator = torch.Generator().manual_seed(0)
    means = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    scales = 0.5 * torch.randn(n, 3, generator=generator) + torch.log(torch.tensor([1, 1, 0.1]) * spacing(n))
    return means, scales, torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)


def spacing(n):
    return math.sqrt(4 * math.pi / n)


def ball(n):
    """The voxels (N, 3) of a ball that touches the sides of a box of n³."""
    return voxels(n, 0.0, n / 2)


def shell(n):
    """Make the voxels of a sphere, one voxel thick."""
    return voxels(n, n / 2 - 1, n / 2)


def voxels(n, inner, outer):
    x = torch.arange(n) - (n - 1) / 2
    square = x[:, None] ** 2 + x**2
    slabs = []
    for i in range(n):  # slab by slab: the box itself is never made
        distance = (square + x[i] ** 2).sqrt()
        found = ((distance >= inner) & (distance < outer)).nonzero()
        slabs.append(torch.cat([torch.full((len(found), 1), i), found], dim=1))
    return torch.cat(slabs)


def edges(n):
    """A random graph of n edges among n / 10 vertices, in both directions."""
    pairs = torch.randint(n // 10, (2, n), generator=torch.Generator().manual_seed(0))
    path = torch.stack([torch.arange(n // 10), torch.arange(n // 10).roll(1)])  # so that none is isolated
    pairs = torch.cat([pairs[:, pairs[0] != pairs[1]], path], dim=1)
    return torch.cat([pairs, pairs.flip(0)], dim=1)


# --- the candidates: a function that returns what was applied, the passes, the error, and how to measure rows


def by_kernel(make):
    def run(data, signal):
        smooth, q = qattn.diffuse(make(data), None, signal, tol=TOL)
        return smooth, int(q.num_iter), float(q.marginal_error), lambda: float(q.kernel_error(num_rows=64))

    return run


def published(product, mass, signal, log=np.log, exp=np.exp):
    """Plain iterations of log-domain scaling with a given product, and an application."""
    f, passes, error = 0 * mass, 0, math.inf
    while error > TOL:
        sums = exp(f) * product(mass * exp(f))
        passes, error = passes + 1, float((mass * abs(sums - 1)).sum() / mass.sum())
        if error > TOL:
            f = f - 0.5 * log(sums)
    columns = [exp(f) * product(mass * exp(f) * column) for column in signal]
    return columns, passes, error, None


def mixture_by_dense_torch(data, signal):
    means = data[0]
    kernel = qattn.MixtureKernel.from_splats(*data, spacing(len(means)))
    covariances, mass = kernel.tensors[1], kernel.mass
    rows = []
    for i in range(0, len(means), 200):  # the matrix is kept, its covariances are not
        C = covariances[i : i + 200, None] + covariances + spacing(len(means)) ** 2 * torch.eye(3)
        apart = means[i : i + 200, None] - means
        form = (apart[..., None, :] @ torch.linalg.solve(C, apart[..., None]))[..., 0, 0]
        rows.append(torch.exp(-0.5 * form) / torch.linalg.det(C).sqrt())
    matrix = torch.cat(rows)
    return published(lambda x: matrix @ x, mass, signal.T, torch.log, torch.exp)


def voxels_by_scipy(n):
    def run(data, signal):
        from scipy.ndimage import gaussian_filter

        places = tuple(data.numpy().T)

        def product(x):
            grid = np.zeros((n, n, n), np.float32)
            grid[places] = x
            return gaussian_filter(grid, 2.0, mode="constant", truncate=4.0, output=grid)[places]

        mass = np.full(len(data), 1 / len(data), np.float32)
        return published(product, mass, signal.T.numpy())

    return run


def graph_by_scipy(data, signal):
    from scipy.sparse import csr_array, diags_array

    size = int(data.max()) + 1
    adjacency = csr_array((np.ones(data.shape[1], np.float32), tuple(data.numpy())), shape=(size, size))
    matrix = (adjacency + diags_array(adjacency.sum(1))).tocsr()
    return published(lambda x: matrix @ x, np.full(size, 1 / size, np.float32), signal.T.numpy())


def voxel_kernel(n):
    def make(data):
        grid = torch.sparse_coo_tensor(data.T, torch.ones(len(data)), (n, n, n), check_invariants=False)
        return qattn.VoxelKernel(grid.coalesce(), 2.0)

    return make


MIXTURE = by_kernel(lambda data: qattn.MixtureKernel.from_splats(*data, spacing(len(data[0]))))
CENTERS = by_kernel(lambda data: qattn.GaussianKernel(data.float(), 2.0))


def in_a_box(shape, n):
    """A case of voxels: how they are made, and by what they are diffused."""
    candidates = {"qattn": by_kernel(voxel_kernel(n)), "cloud of centers": CENTERS, "SciPy filter": voxels_by_scipy(n)}
    return lambda: shape(n), candidates


CASES = {
    "mixture of 5,000": (lambda: splats(5000), {"qattn": MIXTURE, "dense torch": mixture_by_dense_torch}),
    "mixture of 100,000": (lambda: splats(100_000), {"qattn": MIXTURE}),
    "ball in 64³, σ = 2 voxels": in_a_box(ball, 64),
    "ball in 256³, σ = 2 voxels": in_a_box(ball, 256),
    "shell in 1024³, σ = 2 voxels": in_a_box(shell, 1024),
    "graph of a million edges": (
        lambda: edges(1_000_000),
        {"qattn": by_kernel(lambda data: qattn.GraphKernel(data)), "SciPy sparse": graph_by_scipy},
    ),
}


@compile_at_first_call()
def one(case, name, path):
    """Run one candidate in this process, and print a row."""
    candidates = CASES[case][1]
    data = torch.load(path, mmap=True)  # made elsewhere: what making it takes is not the candidate's
    N = len(data[0]) if isinstance(data, tuple) else int(data.max()) + 1 if case.startswith("graph") else len(data)
    signal = torch.randn(N, CHANNELS, generator=torch.Generator().manual_seed(0))
    small = {"mixture": lambda: splats(500), "ball": lambda: ball(16), "shell": lambda: shell(16)}
    few = small.get(case.split()[0], lambda: edges(1000))()
    count = len(few[0]) if isinstance(few, tuple) else int(few.max()) + 1 if case.startswith("graph") else len(few)
    candidates[name](few, signal[:count])  # imports and compiles everything
    qattn.diffusion(torch.randn(5000, 3), 0.1)
    (_, passes, error, row_error), took, megabytes = once(lambda: candidates[name](data, signal))
    row = {"case": case, "name": name, "N": N, "seconds": took, "megabytes": megabytes, "passes": passes}
    row["marginal_error"] = error
    assert error <= TOL
    if row_error is not None:
        row["error"] = row_error()
    print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a candidate may take")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parsed(parser, cases=["mixture of 5,000", "ball in 64³, σ = 2 voxels", "graph of a million edges"])
    if options.one:
        return one(*options.one)

    print(__doc__.splitlines()[0])
    rows, lines = [], ["| | sites | " + "candidate | time | memory | passes | row error |", "|---" * 7 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            base = None
            path = Path(folder) / "data.pt"
            torch.save(CASES[case][0](), path)
            for name in CASES[case][1]:
                start = time.perf_counter()
                row = in_its_own_process(__file__, "--one", case, name, path, limit=options.limit)
                print(f"  {case:30} {name:18} {time.perf_counter() - start:6.0f} s in all", flush=True)
                if isinstance(row, str) and name == "qattn":
                    raise SystemExit(f"{name}: {row}")
                if isinstance(row, str):
                    lines.append(f"| {case} | | {name} | {row} | | | |")
                    continue
                rows.append(row)
                base = base or row["seconds"]
                ratio = "" if name == "qattn" else f" ({row['seconds'] / base:.1f}×)"
                error = f"{row['error']:.0e}" if "error" in row else ""
                lines.append(
                    f"| {case if name == 'qattn' else ''} | {row['N']:,} | {name} | {row['seconds']:.2f} s{ratio} "
                    f"| {row['megabytes']:,.0f} MB | {row['passes']} | {error} |"
                )
    print("\n" + "\n".join(lines))
    findings = [
        finding(case, "{seconds:.2f} s, {megabytes:.0f} MB, error {error:.0e}", [r for r in rows if r["case"] == case])
        for case in options.cases
    ]
    save("modalities", rows, findings, options.quick)


if __name__ == "__main__":
    main()
