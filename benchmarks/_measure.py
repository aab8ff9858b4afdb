"""Timing and the record of the machine, shared by the benchmarks."""

import json
import platform
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
