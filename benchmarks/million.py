"""How long does a million points take, at any bandwidth, against the published way on a CPU and implicit Euler?

Random points of a generated surface, float32, 8 channels; build, normalize to a mean |Q1 − 1| of 1e-3, and apply. The
published way is a symmetric k-NN graph, 5 iterations of log-domain Sinkhorn on it, and an application, written with
SciPy in as few and as wide operations as we could. Implicit Euler is a point
cloud Laplacian and a sparse LU of M + tL with t = σ²/2. Each candidate runs in a process of its own, one after the
other, so that its peak memory is its own: what it needs above the imports, the points and the signal. The error is that
of the row sums, at the potential found, on 256 random rows.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _measure import environment, finding, in_its_own_process, once, parsed, save

import qattn
from qattn.pictures import curves, figure
from qattn.shapes import creature
from qattn.tiles import gaussian, pairs
from qattn.tiles.when_to_compile import compile_at_first_call

CHANNELS = 8
NEIGHBORS = 2.2  # bandwidths, in mean spacings of the points


def by_qattn(points, signal, sigma):
    with LoopClock() as clock:
        smooth, q = qattn.diffuse(points, sigma, signal)
    figures = {"method": q.kernel.method, "passes": int(q.num_iter), "loop": clock.seconds}
    return smooth, figures, lambda: float(q.kernel_error())


class LoopClock:
    """Seconds that are spent in the compiled loop over pairs; the rest sorts, lays out and updates."""

    def __enter__(self):
        self.seconds, self._share = 0.0, gaussian.share
        gaussian.share = pairs.share = self._timed
        return self

    def _timed(self, *arguments):
        start = time.perf_counter()
        self._share(*arguments)
        self.seconds += time.perf_counter() - start

    def __exit__(self, *_):
        gaussian.share = pairs.share = self._share


def by_neighbors(k):
    def run(points, signal, sigma):
        from scipy.sparse import csr_matrix
        from scipy.spatial import cKDTree

        N, x, start = len(points), points.numpy(), time.perf_counter()
        distances, index = cKDTree(x).query(x, k, workers=torch.get_num_threads())
        weights = np.exp(-0.5 * (distances / sigma) ** 2).astype(np.float32).ravel()
        graph = csr_matrix((weights, index.astype(np.int32).ravel(), np.arange(0, N * k + 1, k)), shape=(N, N))
        graph = graph.maximum(graph.T)  # symmetric, or there is nothing to normalize symmetrically
        scores, columns, starts = np.log(graph.data), graph.indices, graph.indptr[:-1]
        rows = np.repeat(np.arange(N, dtype=np.int32), np.diff(graph.indptr))
        built = time.perf_counter()

        def logsumexp(bias):
            entries = scores + bias[columns]
            largest = np.maximum.reduceat(entries, starts)
            entries -= largest[rows]
            return largest + np.log(np.add.reduceat(np.exp(entries, out=entries), starts))

        f, log_mass = np.zeros(N, np.float32), np.float32(-math.log(N))
        for _ in range(5):
            f = 0.5 * (f - logsumexp(f + log_mass))
        figures = {"passes": 5, "build": built - start, "run": time.perf_counter() - built}
        graph.data *= np.exp(f)[rows] * np.exp(f + log_mass)[columns]

        def error():
            some = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:256]
            found = torch.from_numpy(logsumexp(f + log_mass))[some].double()
            exact = qattn.GaussianKernel(points, sigma, method="exact")
            return float(torch.expm1(found - exact.exact_lse(some, torch.from_numpy(f + log_mass))).abs().amax())

        return torch.from_numpy(graph @ signal.numpy()), figures, error

    return run


def by_implicit_euler(points, signal, sigma):
    from robust_laplacian import point_cloud_laplacian
    from scipy.sparse.linalg import splu

    start = time.perf_counter()
    laplacian, mass = point_cloud_laplacian(points.double().numpy())
    built = time.perf_counter()
    matrix = (mass + 0.5 * sigma**2 * laplacian).tocsc()
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    found = factors.solve(mass @ signal.double().numpy())
    return torch.from_numpy(found), {"build": built - start, "run": time.perf_counter() - built}, None


CANDIDATES = {
    "qattn": by_qattn,
    "k-NN, k = 25": by_neighbors(25),
    "k-NN, k = 100": by_neighbors(100),
    "implicit Euler": by_implicit_euler,
}


@compile_at_first_call()
def one(name, path, sigma):
    """Run one candidate in this process, and print a row."""
    points = torch.from_numpy(np.load(path))
    signal = torch.randn(len(points), CHANNELS, generator=torch.Generator().manual_seed(0))
    run = CANDIDATES[name]
    some = creature(2000)[0]  # imports and compiles everything, by each of the methods
    if name == "qattn":
        for method in ("exact", "tiles", "fourier"):
            qattn.diffuse(some, 0.2, signal[: len(some)], method=method)
        qattn.diffusion(some.repeat(4, 1), 0.2)
    run(some, signal[: len(some)], 0.2)
    (applied, figures, error), took, megabytes = once(lambda: run(points, signal, sigma))
    row = {"name": name, "N": len(points), "sigma": sigma, "seconds": took, "megabytes": megabytes, **figures}
    row["finite"] = bool(applied.isfinite().all())
    if error is not None:
        row["error"] = error()
    print(json.dumps(row))


def measure(name, path, sigma, limit):
    """Run one candidate in its own process; return None if it exceeds the limits of time or memory."""
    row = in_its_own_process(__file__, "--candidate", name, "--cloud", path, "--sigma", sigma, limit=limit)
    if isinstance(row, str) and name == "qattn":
        raise SystemExit(f"{name}: {row}")
    if isinstance(row, str):
        print(f"  {name:16} {row}", flush=True)
        return None
    assert row["finite"]
    detail = ", ".join(f"{key} {row[key]}" for key in ("method", "passes") if key in row)
    if row.get("method") == "tiles":
        rest = row["seconds"] - row["loop"]
        detail += f", loop {row['loop']:.2f} s, rest {rest:.2f} s ({rest / row['loop']:.0%} of it)"
    error = f"row error {row['error']:.0e}" if "error" in row else ""
    print(
        f"  N = {row['N']:8,}  σ = {sigma:.4f}  {name:16} {row['seconds']:8.2f} s {row['megabytes']:7.0f} MB"
        f"  {error:16} {detail}",
        flush=True,
    )
    return row


def spacing(points):
    """√(area / N) of random points on a surface: twice the mean distance to the nearest other one."""
    from scipy.spatial import cKDTree

    some = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:2000]]
    return 2 * float(cKDTree(points.numpy()).query(some.numpy(), 2)[0][:, 1].mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--more", type=int, nargs="*", default=[300_000, 4_000_000], help="sizes for qattn alone")
    parser.add_argument(
        "--sweep", type=float, nargs="*", default=[0.002, 0.005, 0.01, 0.014, 0.02, 0.03, 0.1, 0.3, 1.0]
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a candidate may take")
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    parser.add_argument("--cloud", help=argparse.SUPPRESS)
    parser.add_argument("--sigma", type=float, help=argparse.SUPPRESS)
    options = parsed(parser, sizes=[20_000], more=[], sweep=[0.03, 0.3])
    if options.candidate:
        return one(options.candidate, options.cloud, options.sigma)

    print(__doc__.splitlines()[0])
    rows, sweep = [], []
    with tempfile.TemporaryDirectory() as folder:
        largest = max(options.sizes)
        for N in sorted({*options.sizes, *options.more}):
            points = creature(N)[0]
            path = Path(folder) / f"{N}.npy"
            np.save(path, points.numpy())
            sigma = NEIGHBORS * spacing(points)
            for name in CANDIDATES if N in options.sizes else ["qattn"]:
                rows.append(measure(name, path, sigma, options.limit))
            if largest == N:
                extent = float((points - points.mean(0)).norm(dim=-1).amax())
                print(f"  bandwidths of {N:,} points, in radii of the shape:")
                sweep = [measure("qattn", path, s * extent, options.limit) for s in options.sweep]
    rows, sweep = ([row for row in some if row] for some in (rows, sweep))
    ours = "{seconds:.2f} s, {megabytes:.0f} MB, error {error:.0e}"
    findings = [finding(f"{N:,} points", ours, [r for r in rows if r["N"] == N]) for N in options.sizes]
    report(rows, sweep, save("million", rows + sweep, findings, options.quick).with_suffix(".png"))


def report(rows, sweep, path):
    picture = figure(11, 4.2)
    left, right = picture.subplots(1, 2)
    curves(left, rows, "N", "seconds")
    left.set(xscale="log", yscale="log", xlabel="points", ylabel="seconds: build, normalize, apply 8 channels")
    left.set_title(f"σ = {NEIGHBORS} spacings, {environment()['threads']} threads", fontsize=10)
    curves(right, sweep, "sigma", "seconds", by="method")
    right.set(xscale="log", xlabel="σ, in a shape of radius 1", ylabel="seconds", ylim=(0, None))
    right.set_title(f"{sweep[0]['N']:,} points, method chosen" if sweep else "", fontsize=10)
    picture.savefig(path, dpi=130)

    ours = [row for row in rows if row["name"] == "qattn" and row["N"] >= 100_000]
    if len(ours) > 1:
        slope = np.polyfit(*np.log([[row["N"] for row in ours], [row["seconds"] for row in ours]]), 1)[0]
        print(f"\nslope of log time against log N from {ours[0]['N']:,} to {ours[-1]['N']:,}: {slope:.2f}")
    print("\n| points | qattn | " + " | ".join(name for name in CANDIDATES if name != "qattn") + " |")
    print("|---" * (1 + len(CANDIDATES)) + "|")
    for N in dict.fromkeys(row["N"] for row in rows):
        found = {row["name"]: row for row in rows if row["N"] == N}
        base = found["qattn"]
        cells = [f"{base['seconds']:.2f} s, {base['megabytes']:.0f} MB, error {base['error']:.0e}"]
        for name in CANDIDATES:
            if name != "qattn":
                row = found.get(name)
                cells.append(
                    f"{row['seconds']:.1f} s ({row['seconds'] / base['seconds']:.0f}×), {row['megabytes']:.0f} MB"
                    + (f", error {row['error']:.0e}" if "error" in row else "")
                    if row
                    else "–"
                )
        print(f"| {N:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
