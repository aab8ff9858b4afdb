import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

CPU = Path("/proc/cpuinfo")
# Some virtual machines announce AMX and do not allow it: torch then dies of SIGILL in products of bfloat16.
if "ONEDNN_MAX_CPU_ISA" not in os.environ and CPU.exists() and "amx_tile" in CPU.read_text():
    product = "import torch; x = torch.ones(512, 512).bfloat16(); x @ x"
    if subprocess.run([sys.executable, "-c", product], capture_output=True, check=False).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # before torch is imported, here and in workers

# Workers share the cores. With all of them in each, threads wait for one another, and tests take several times as long.
if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from qattn.tiles import when_to_compile  # noqa: E402

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _loops():
    """Tests are of the loops, from the first pair on."""
    with when_to_compile.compile_at_first_call():
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords hold names of folders too
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def _flex_everywhere(monkeypatch):
    """Older versions of torch are a reason of their own against FlexAttention (`tests/test_versions.py`)."""
    monkeypatch.setattr("qattn._versions._TORCH", (2, 13))


@pytest.fixture
def _cold(monkeypatch):
    """A machine on which nothing is compiled, or remembered."""
    monkeypatch.setattr(when_to_compile, "is_compiled", lambda task: False)
    monkeypatch.setattr(when_to_compile, "remember", lambda task: None)
    monkeypatch.setattr(when_to_compile, "_spent", {})


@pytest.fixture
def _slow_machine(monkeypatch):
    """A machine on which ten seconds pass between any two looks at the clock of progress bars."""
    monkeypatch.setattr("qattn._progress.time", SimpleNamespace(monotonic=itertools.count(0, 10).__next__))


@pytest.fixture
def _one_thread():
    """Small products by several threads wait for one another where several workers share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
