"""How long does the first result take on a machine where nothing is compiled, by part?

Random points of a cube, or a mixture of Gaussians with such means, float32, 8 channels; normalize to a mean |Q1 − 1| of
1e-3, and apply. Each candidate runs in a process of its own: "at once" compiles every loop before it first runs, with
an empty cache; "compiled" finds the cache that it leaves; "qattn" starts with an empty cache, and lets torch compute
until compiling pays. Seconds of the processor are those of all threads: on a machine that is not idle they say more
than the clock. The error is the largest difference from "at once", for signals between 0 and 1. "collector" is the part
of importing qattn that Python's collector of garbage takes, for all objects of torch. Commands are timed too, on a file
of a hundred points.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _measure import finding, parsed, save

from qattn import io
from qattn.shapes import sphere

CANDIDATES = ("at once", "compiled", "qattn")
PARTS = ("import torch", "import qattn", "import numba", "normalize", "apply")
FIRST_RESULT = """
import gc, json, sys, time

name, count, data, sigma, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5]
marks, start = {}, time.perf_counter()


def mark(part):
    global start
    marks[part], start = time.perf_counter() - start, time.perf_counter()


import torch
mark("import torch")
collected, begin = 0.0, 0.0


def collector(phase, _):
    global collected, begin
    if phase == "start":
        begin = time.perf_counter()
    else:
        collected += time.perf_counter() - begin


gc.callbacks.append(collector)
start = time.perf_counter()
import qattn
mark("import qattn")
gc.callbacks.clear()
from numba.core import event
mark("import numba")


class Compiler(event.Listener):
    depth, count, seconds = 0, 0, 0.0

    def on_start(self, happening):
        if self.depth == 0:
            self.start = time.perf_counter()
        self.depth += 1

    def on_end(self, happening):
        self.depth -= 1
        self.count += 1
        if self.depth == 0:
            self.seconds += time.perf_counter() - self.start


compiler = Compiler()
event.register("numba:compile", compiler)
from contextlib import nullcontext
from qattn.tiles.when_to_compile import compile_at_first_call
points, signal = torch.rand(count, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 8 * count)
with nullcontext() if name == "qattn" else compile_at_first_call():
    start = time.perf_counter()
    if data == "Gaussians":
        q = qattn.diffusion(qattn.MixtureKernel(points, torch.full((count,), 1e-4), sigma))
    else:
        q = qattn.diffusion(points, sigma)
    mark("normalize")
    smooth = q @ signal.reshape(count, 8)
    mark("apply")
spent = {"seconds": sum(marks.values()), "collector": collected, "processor": time.process_time()}
compiled = {"num_compiled": compiler.count, "compiling": compiler.seconds}
torch.save(smooth, path)
print(json.dumps({**marks, **spent, "method": q.kernel.method, **compiled}))
"""


def first_result(name, count, data, sigma, folder):
    """The parts of a process that starts with the caches of a folder, and what it has computed."""
    result = folder / "smooth.pt"
    done = subprocess.run(
        [sys.executable, "-c", FIRST_RESULT, name, str(count), data, str(sigma), str(result)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder / "loops")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]), torch.load(result)


def command(*arguments):
    """Seconds of a command, by the clock and of the processor."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "qattn", *map(str, arguments)], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - start, "processor": processor}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[
            "2000 points,0.1", "20000 points,0.05", "20000 points,0.01", "1000000 points,0.01", "2000 Gaussians,0.1",
            "10000 Gaussians,0.05",
        ],
        help="what,sigma",
    )  # fmt: skip
    options = parsed(parser, cases=["2000 points,0.1", "1000 Gaussians,0.1"])

    print(__doc__.splitlines()[0])
    rows, findings = [], []
    columns = ("data", "σ", "candidate", *PARTS, "all", "processor", "compiling", "method", "error")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for case in options.cases:
        what, sigma = case.split(",")
        count, data = what.split()
        count, sigma = int(count), float(sigma)
        reference, of_case = None, []
        with tempfile.TemporaryDirectory() as kept:
            for name in CANDIDATES:
                with tempfile.TemporaryDirectory() as empty:
                    row, smooth = first_result(name, count, data, sigma, Path(empty if name == "qattn" else kept))
                reference = smooth if reference is None else reference
                error = float((smooth - reference).abs().amax())
                assert error < 5e-3, f"{name} is off by {error}"
                row = {"name": name, "N": count, "data": data, "sigma": sigma, **row, "error": error}
                of_case.append(row)
                times = " | ".join(f"{row[part]:.2f}" for part in (*PARTS, "seconds", "processor", "compiling"))
                print(f"| {count:,} {data} | {sigma} | {name} | {times} | {row['method']} | {error:.0e} |", flush=True)
        rows += of_case
        findings.append(finding(f"first result, {count:,} {data}, σ = {sigma}", "{seconds:.1f} s", of_case))
    with tempfile.TemporaryDirectory() as folder:
        cloud = Path(folder) / "small.ply"
        io.write(cloud, io.Cloud(sphere(100).numpy()))
        for arguments in (("--help",), ("info", cloud)):
            name = f"qattn {arguments[0]}"
            command(*arguments)  # writes bytecode
            row = {"name": "qattn", "command": name, **command(*arguments)}
            rows.append(row)
            findings.append(finding(name, "{seconds:.1f} s", [row]))
            print(f"\n{name}: {row['seconds']:.2f} s, {row['processor']:.2f} s of the processor")
    save("cold_start", rows, findings, options.quick)


if __name__ == "__main__":
    main()
