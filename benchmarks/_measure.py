"""Timing and the record of the machine, shared by the benchmarks."""

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import qattn

RECORDS = Path(__file__).parent / "records"  # of full sizes, committed
RESULTS = Path(__file__).parent / "results"  # of quick ones


def parsed(parser: argparse.ArgumentParser, **sizes: object) -> argparse.Namespace:
    """The options; with --quick, these sizes take the place of defaults, and the benchmark takes seconds."""
    parser.add_argument("--quick", action="store_true", help="small sizes: a look, no measurement to quote")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**sizes)
    return parser.parse_args()


def seconds(run: Callable[[], object], budget: float = 2.0) -> float:
    """The best of the runs that fit the budget, because noise only ever adds; a run that is longer is made once."""
    best, start = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - start < budget:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def _memory(field: str) -> float:
    """Megabytes of this process: VmRSS now, VmHWM at most since the last reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def once(run: Callable[[], object]) -> tuple[object, float, float]:
    """Return the result of a function, its seconds, and its peak of megabytes above those in use before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or the run would take what is free already
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _memory("VmRSS"), time.perf_counter()
    result = run()
    took = time.perf_counter() - start
    return result, took, _memory("VmHWM") - before


def in_its_own_process(script: str, *arguments: object, limit: float) -> dict[str, object] | str:
    """The last line, in JSON, of a script run with arguments; or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"not done in {limit:.0f} s"
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, object]:
    """Describe the machine and the versions that figures are measured with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qattn": qattn.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def finding(case: str, ours: str, rows: list[dict[str, object]], figure: str = "seconds") -> dict[str, str]:
    """Make a line of the summary: our figure, and the multiples of it that the others of these rows take."""
    rows = [row for row in rows if figure in row]
    base = next((row for row in rows if row["name"] in ("qattn", "native")), None)
    if base is None:
        return {"case": case, "qattn": "none", "others": ""}
    others = (f"{row['name']} {row[figure] / base[figure]:.2g}×" for row in rows if row is not base)
    return {"case": case, "qattn": ours.format(**base), "others": "; ".join(others)}


def save(name: str, rows: list[dict[str, object]], findings: list[dict[str, str]], quick: bool) -> Path:
    """Writes rows, findings and the environment to records/<name>.json, or results/<name>.json for quick sizes."""
    path = (RESULTS if quick else RECORDS) / f"{name}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"environment": environment(), "findings": findings, "rows": rows}, indent=1))
    print(f"\nwrote {path.relative_to(RESULTS.parent)}")
    return path
