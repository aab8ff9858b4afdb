"""Timing and the record of the machine, shared by the benchmarks."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import qattn

RESULTS = Path(__file__).parent / "results"


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
    """What a function returns, its seconds, and the megabytes that it needs at most, above those in use before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _memory("VmRSS"), time.perf_counter()
    result = run()
    took = time.perf_counter() - start
    return result, took, _memory("VmHWM") - before


def in_its_own_process(*arguments: object, limit: float) -> dict[str, object] | str:
    """The last line, in JSON, of this script run with arguments; or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, sys.argv[0], *map(str, arguments)], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"not done in {limit:.0f} s"
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, object]:
    """What the figures were measured on."""
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


def save(name: str, rows: list[dict[str, object]]) -> Path:
    """Writes the rows and the environment to results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    return path
