"""How fast is this version, compared with another checkout of the project, on the same machine?

    python benchmarks/compare.py ../qattn-before

Problems are those of the other benchmarks, as each checkout defines them, without peers. The checkouts take turns, each
problem in a process of its own, and the best time counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _measure import parsed, save

HERE = Path(__file__).parents[1]

ATTENTION = """
import functools, json, torch, attention
from _measure import seconds
run, found = attention.candidates("cpu")["native"], {}
for channels in (0, 8):
    inputs = attention.standard_problem(SIZE, torch.float32, "cpu", channels)
    run(inputs)
    found[f"attend, {channels} channels"] = seconds(functools.partial(run, inputs), 2.0)
print(json.dumps(found))
"""
NORMALIZE = """
import json, normalize
from _measure import seconds
points, signal = normalize.problem(SIZE)
run = normalize.candidates(normalize.reached(points, 0.05))["qattn"]
run(points, signal, 0.05)
print(json.dumps({"normalize and apply": seconds(lambda: run(points, signal, 0.05), 3.0)}))
"""
CLOUD = """
import sys, numpy, million
from qattn.shapes import creature
points = creature(int(sys.argv[1]))[0]
numpy.save(sys.argv[2], points.numpy())
print(million.NEIGHBORS * million.spacing(points))
"""


def run(tree, arguments):
    """Run Python in the benchmarks of a checkout; return the last line that it prints, from JSON."""
    folder = Path(tree).resolve() / "benchmarks"
    environment = os.environ | {"PYTHONPATH": f"{folder.parent}:{folder}"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def problems(options, folder):
    """Arguments of Python by problem, each with the figures that count."""
    n = options.size
    cloud = Path(folder) / "cloud.npy"
    sigma = run(HERE, ["-c", CLOUD, str(50 * n), str(cloud)])
    both = {"seconds": "s", "megabytes": "MB"}
    return {
        f"attention, {n:,} points": (["-c", ATTENTION.replace("SIZE", str(n))], None),
        f"normalize, {n:,} points": (["-c", NORMALIZE.replace("SIZE", str(n))], None),
        f"build, normalize and apply, {50 * n:,} points": (
            ["million.py", "--candidate", "qattn", "--cloud", str(cloud), "--sigma", str(sigma)],
            both,
        ),
        f"a training step of the paper's layer, {n // 10:,} points": (
            ["layers.py", "--one", "qattn", str(n // 10), "3"],
            both,
        ),
        f"a training step of the paper's layer, {n // 2:,} points": (
            ["layers.py", "--one", "qattn", str(n // 2), "3"],
            both,
        ),
        f"40 eigenpairs of {12 * n:,} points": (["spectra.py", "--one", "qattn", str(12 * n), "40"], both),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", help="folder of the other checkout")
    parser.add_argument("--size", type=int, default=20_000, help="points, about; other problems in proportion")
    parser.add_argument("--rounds", type=int, default=2)
    options = parsed(parser, size=1000, rounds=1)
    print(__doc__.splitlines()[0])
    best = {}
    for tree in (HERE, options.other):  # checkouts before 0.2.0 have no such command: they compile at the first call
        subprocess.run([sys.executable, "-m", "qattn", "warm"], cwd=tree, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        found = problems(options, folder)
        for _ in range(options.rounds):
            for problem, (arguments, figures) in found.items():
                for name, tree in (("qattn", HERE), ("other", options.other)):
                    row = run(tree, arguments)
                    for field in figures or row:
                        key = f"{problem}: {(figures or {}).get(field, field)}"
                        times = best.setdefault(key, {})
                        times[name] = min(times.get(name, float("inf")), row[field])
    for key, row in best.items():
        print(f"  {key:75} {row['other']:10.4g} → {row['qattn']:10.4g}   ÷ {row['other'] / row['qattn']:.2f}")
    rows = [{"case": key, **row} for key, row in best.items()]
    findings = [
        {"case": row["case"], "qattn": f"{row['qattn']:.3g}", "others": f"other {row['other'] / row['qattn']:.2g}×"}
        for row in rows
    ]
    save("compare", rows, findings, options.quick)


if __name__ == "__main__":
    main()
