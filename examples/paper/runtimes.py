"""Runtimes of normalizing against a sparse LU of M + tL: table 1 and the table of appendix F of the paper.

Points of a generated surface, σ = 2.2 spacings and t = σ²/2. qattn builds the kernel, normalizes it to a mean |Q1 − 1|
of 1e-3 and applies it, in one figure. Its peers are those of `benchmarks/million.py`, each in a process of its own;
what is built before is in brackets, as in the paper: the symmetric k-NN graph before 5 iterations on it, the Laplacian
before LU and solve. Up to `--pairs` points there are also the paper's 5 iterations over all pairs by PyKeOps, on this
CPU. The paper's GPU is a V100, and its CPUs are two others: only ratios within one machine mean something.

The error is that of the row sums against all pairs, on 256 rows. Needs the extra `bench`.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from claims import parsed, report

from qattn.pictures import curves, figure
from qattn.shapes import creature

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import million
import normalize
from _measure import seconds

# Table 1, in ms: 5 iterations by PyKeOps on a V100, and LU on a Xeon Gold 6248.
TABLE_1 = {
    10_000: (3, 65),
    50_000: (21, 393),
    100_000: (89, 1030),
    250_000: (448, 3510),
    500_000: (1817, 9100),
    1_000_000: (6789, 23_600),
}
# Appendix F, in s on a Xeon E5-2695: implicit Euler; 5 iterations and the graph, with k = 25 and with k = 100.
APPENDIX_F = {
    10_000: (0.428, (0.010, 0.117), (0.022, 0.274)),
    100_000: (2.921, (0.064, 0.612), (0.338, 1.819)),
    1_000_000: (71.776, (0.971, 6.004), (5.199, 18.351)),
}
EULER, GRAPHS = "implicit Euler", {25: "k-NN, k = 25", 100: "k-NN, k = 100"}
PAIRS = "PyKeOps, all pairs"


def measured(points, folder, options):
    """Rows by name: of qattn and its peers, as far as they end."""
    path, sigma = Path(folder) / f"{len(points)}.npy", million.NEIGHBORS * million.spacing(points)
    np.save(path, points.numpy())
    rows = {name: million.measure(name, path, sigma, options.limit) for name in million.CANDIDATES}
    if len(points) <= options.pairs and importlib.util.find_spec("pykeops"):
        signal = torch.randn(len(points), million.CHANNELS, generator=torch.Generator().manual_seed(0))
        normalize.published(points[:100], signal[:100], sigma, normalize.pykeops, iterations=1)  # compiles
        took = seconds(lambda: normalize.published(points, signal, sigma, normalize.pykeops, iterations=5))
        print(f"  N = {len(points):8,}  σ = {sigma:.4f}  {PAIRS:16} {took:8.2f} s", flush=True)
        rows[PAIRS] = {"name": PAIRS, "N": len(points), "seconds": took}
    return {name: row for name, row in rows.items() if row}


def parts(row):
    """Seconds to run and to build, as the paper gives them."""
    return f"{row['run']:.3f} (+{row['build']:.3f})" if row else "–"


def listed(ratios):
    return ", ".join(f"{ratio:.2g}× at {N:,}" for N, ratio in ratios.items())


def tables(found):
    """The two tables, with the paper's figures and ratios beside those here."""
    print("\ntable 1: all pairs on a GPU, qattn here; LU on a CPU")
    print(f"{'points':>10} | {'V100, s':>8} {'LU, s':>8} {'ratio':>6} | {'qattn, s':>8} {'LU, s':>8} {'ratio':>6}")
    for N, rows in found.items():
        said = (ms / 1000 for ms in TABLE_1[N]) if N in TABLE_1 else (np.nan, np.nan)
        here = rows["qattn"]["seconds"], rows.get(EULER, {}).get("run", np.nan)
        cells = (f"{ours:8.3f} {lu:8.3f} {lu / ours:5.1f}×" for ours, lu in (said, here))
        print(f"{N:10,} | {' | '.join(cells)}".replace("nan", "  –"))
    print("\nappendix F: seconds on CPUs; in brackets, what is built before")
    print(f"{'points':>10} {'':10} {'implicit Euler':>18} {'k = 25':>18} {'k = 100':>18} {'qattn':>8}")
    for N, rows in found.items():
        if N in APPENDIX_F:
            euler, *graphs = APPENDIX_F[N]
            said = " ".join(f"{f'{run:.3f} (+{build:.3f})':>18}" for run, build in graphs)
            print(f"{N:10,} {'the paper':10} {euler:18.3f} {said}")
        here = " ".join(f"{parts(rows.get(name)):>18}" for name in (EULER, *GRAPHS.values()))
        print(f"{N:10,} {'here':10} {here} {rows['qattn']['seconds']:8.3f}")
        errors = " ".join(f"{rows[name]['error']:18.0e}" if name in rows else f"{'–':>18}" for name in GRAPHS.values())
        print(f"{'':10} {'error':10} {'':18} {errors} {rows['qattn']['error']:8.0e}")


def draw(found, path):
    picture = figure(14, 4.6)
    left, right = picture.subplots(1, 2)
    curves(left, [row for rows in found.values() for row in rows.values()], "N", "seconds")
    left.set(xscale="log", yscale="log", xlabel="points", ylabel="seconds, all included")
    left.set_title(f"here, {torch.get_num_threads()} threads", fontsize=11)
    said = {"qattn": ("the paper: V100, all pairs", {N: lu / gpu for N, (gpu, lu) in TABLE_1.items()})}
    for number, (k, name) in enumerate(GRAPHS.items(), 1):
        said[name] = f"the paper: k = {k}", {N: row[0] / sum(row[number]) for N, row in APPENDIX_F.items()}
    for color, (name, (label, speedups)) in zip(("C0", "C1", "C2"), said.items(), strict=True):
        both = {N: rows for N, rows in found.items() if {EULER, name} <= rows.keys()}
        here = {N: rows[EULER]["run"] / rows[name]["seconds"] for N, rows in both.items()}
        right.plot(speedups.keys(), speedups.values(), "s--", color=color, alpha=0.4, label=label)
        right.plot(here.keys(), here.values(), "o-", color=color, label=f"here: {name}")
    right.axhline(1, color="0.6", lw=0.8)
    right.set(xscale="log", yscale="log", xlabel="points", ylabel="times as fast as LU and solve")
    right.set_title("against a sparse LU", fontsize=11)
    right.grid(alpha=0.3, which="both")
    right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    picture.savefig(path, dpi=110)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(TABLE_1))
    parser.add_argument("--pairs", type=int, default=10_000, help="the most points for PyKeOps over all pairs")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for each candidate and size")
    parser.add_argument("--output", default="runtimes.png")
    options = parsed(parser, sizes=[4000], pairs=0)

    with tempfile.TemporaryDirectory() as folder:
        found = {N: measured(creature(N)[0], folder, options) for N in options.sizes}
    tables(found)
    draw(found, options.output)

    def faster(says, paper, name, seconds):
        """Compare speeds with LU and solve; a claim holds with half of the paper's ratios, else it is only reported."""
        both = {N: rows for N, rows in found.items() if {EULER, name} <= rows.keys()}
        here = {N: rows[EULER]["run"] / seconds(rows[name]) for N, rows in both.items()}
        shared = [here[N] > paper[N] / 2 for N in paper.keys() & here.keys()]
        holds = True if shared and all(shared) and not options.quick else None
        return f"{says}, as fast as LU and solve: {listed(paper)}", listed(here) or "no sparse LU here", holds

    table_1 = {N: lu / gpu for N, (gpu, lu) in TABLE_1.items()}
    claims = [
        faster(
            "all pairs on a V100 (here qattn, all included, on the CPU)", table_1, "qattn", lambda row: row["seconds"]
        )
    ]
    for number, (k, name) in enumerate(GRAPHS.items(), 1):
        alone = {N: row[0] / row[number][0] for N, row in APPENDIX_F.items()}
        whole = {N: row[0] / sum(row[number]) for N, row in APPENDIX_F.items()}
        claims += [
            faster(f"k = {k} without its graph", alone, name, lambda row: row["run"]),
            faster(f"k = {k} with its graph", whole, name, lambda row: row["run"] + row["build"]),
        ]
    errors = {
        name: [rows[name]["error"] for rows in found.values() if name in rows] for name in ("qattn", *GRAPHS.values())
    }
    spread = "; ".join(f"{name}: {min(error):.0e} to {max(error):.0e}" for name, error in errors.items())
    is_exact = max(errors["qattn"]) <= 1e-3 < min(min(errors[name]) for name in GRAPHS.values())
    report(*claims, ("no errors are given", f"those of row sums are, {spread}", is_exact))


if __name__ == "__main__":
    main()
