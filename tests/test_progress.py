"""Long computations show their progress on terminals, and can be interrupted."""

import io
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import sphere

from qattn import diffusion
from qattn._progress import watched
from qattn.kernels import GaussianKernel


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_of(monkeypatch):
    """Replace stderr within a test; pytest would undo it in a fixture."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.usefixtures("_slow_machine")
def test_a_long_solve_shows_its_passes_and_error(monkeypatch):
    terminal = terminal_of(monkeypatch)
    q = diffusion(sphere(300), 0.3, tol=1e-6)
    assert "Sinkhorn" in terminal.getvalue()
    assert "error=" in terminal.getvalue()
    q.power(5, torch.randn(300).double())
    assert "Diffusion" in terminal.getvalue()
    assert "/5" in terminal.getvalue()


def test_a_short_one_shows_nothing(monkeypatch):
    terminal = terminal_of(monkeypatch)
    diffusion(sphere(300), 0.3)
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("_slow_machine")
def test_nothing_is_shown_where_nobody_looks(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    diffusion(sphere(300), 0.3)
    assert stream.getvalue() == ""


def test_passes_are_told_to_those_who_watch_in_their_thread():
    told, others = [], []
    with watched(lambda *counts: told.append(counts)):
        q = diffusion(sphere(300), 0.3)
        passes = list(told)
        q.power(3, torch.randn(300).double())
        thread = threading.Thread(target=lambda: others.append(diffusion(sphere(300), 0.3)))
        thread.start()
        thread.join()
    assert passes == [(count, None) for count in range(1, 1 + int(q.num_iter))]
    assert told[len(passes) :] == [(1, 3), (2, 3), (3, 3)]
    assert len(others) == 1
    diffusion(sphere(300), 0.3)
    assert len(told) == len(passes) + 3


@pytest.mark.usefixtures("_slow_machine")
def test_the_bar_is_closed_when_a_solve_is_stopped(monkeypatch):
    terminal = terminal_of(monkeypatch)
    kernel = GaussianKernel(sphere(300), 0.3)
    attend, passes = kernel.attend, []

    def interrupted(bias, value=None, **options):
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return attend(bias, value, **options)

    monkeypatch.setattr(kernel, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        diffusion(kernel)
    assert terminal.getvalue().rstrip(" ").endswith("\r")  # the line is cleared
    assert diffusion(kernel).converged


SCRIPT = """
import signal, threading, time, torch, qattn
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in what a shell runs in the background
points = torch.randn(100_000, 3)
qattn.diffusion(points, SIGMA, method="METHOD")
print("ready", flush=True)
try:
    while True:
        qattn.diffusion(points, SIGMA, method="METHOD", tol=1e-5)
except KeyboardInterrupt:
    for _ in range(100):  # a thread that was about to end may still be there
        if threading.active_count() == 1:
            break
        time.sleep(0.05)
    print("stopped", threading.active_count())
    q = qattn.diffusion(points[:5000], 0.3, method="METHOD")
    print("works", bool(q.converged))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "tiles", "fourier"])
def test_control_c(method):
    """A solve stops within seconds, leaves no thread behind, and the next one works."""
    script = SCRIPT.replace("METHOD", method).replace("SIGMA", "0.5" if method == "fourier" else "0.05")
    if method == "exact":
        script = script.replace("100_000", "10_000")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.7)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()  # else it would go on forever, if it did not stop
    assert output.split() == ["stopped", "1", "works", "True"]
    assert process.returncode == 0
