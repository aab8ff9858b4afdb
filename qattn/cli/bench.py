"""`qattn bench`."""

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qattn import _checks
from qattn.cli.reading import ABOUT_FILE, read_cloud
from qattn.cli.sigma import ABOUT_SIGMA, bandwidth
from qattn.cli.speaking import counted, one_sentence
from qattn.io import Cloud
from qattn.kernels import GaussianKernel
from qattn.operators import diffusion
from qattn.shapes import creature

__all__ = ["bench"]

_SIGMAS = ["3x", "2%", "10%"]
_CHANNELS = 8
_PASSES = 6  # of a method that may be left out: about what normalising and applying take
_BUDGET = 1.0  # seconds in which a measurement is repeated, and the best taken


def bench(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=f"{ABOUT_FILE} Without one, a generated surface.")
    ] = None,
    points: Annotated[int, typer.Option(metavar="N", help="How many points the generated surface has.")] = 100_000,
    sigma: Annotated[
        list[str], typer.Option(metavar="SIGMA", help=f"{ABOUT_SIGMA} May be given repeatedly.")
    ] = _SIGMAS,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Leave a method out that should take more seconds.")
    ] = 60.0,
) -> None:
    """Compare the methods on this machine: how long each takes to diffuse a cloud, and how exact it is.

    Seconds are those of building, normalising and applying to 8 channels; errors those of row sums against all pairs,
    on 256 random rows. What `method="auto"` takes is marked. The kernel is that of the points, also of splats.
    """
    with one_sentence():
        _checks.positive("--limit", limit)
        _checks.integer("--points", points, 1000)
        cloud = Cloud(creature(points)[0].double().numpy()) if file is None else read_cloud(file)
        lengths = [bandwidth(text, cloud) for text in sigma]
        places = torch.from_numpy(cloud.points)
        mass = None if cloud.mass is None else torch.from_numpy(cloud.mass)
        signal = torch.randn(len(places), _CHANNELS, generator=torch.Generator().manual_seed(0))
        table = Table("σ", "method", "seconds", "against auto", "error", "remark")
        for column in (0, 2, 3, 4):
            table.columns[column].justify = "right"
        with Console(stderr=True).status("compiling") as status:
            for method in ("exact", "tiles", "fourier"):
                diffusion(places[:500], lengths[-1], method=method, signal=signal[:500])
            for length in lengths:
                status.update(f"σ = {length:.4g}")
                for row in _rows(places, length, mass, signal, limit):
                    table.add_row(*row)
                table.add_section()
        threads = counted(torch.get_num_threads(), "thread")
        typer.echo(f"{counted(len(places), 'point')}, {threads}, torch {torch.__version__}")
        Console().print(table)


def _rows(points: Tensor, sigma: float, mass: Tensor | None, signal: Tensor, limit: float) -> list[list[str]]:
    """What "auto" takes first, which the others are compared to."""
    (choice,) = GaussianKernel(points, sigma).choices
    rows, first = [], 0.0
    for method in sorted(choice.notes, key=lambda name: name != choice.method):
        mark = " ← auto" if method == choice.method else ""
        expected = _PASSES * choice.seconds.get(method, math.inf)
        if not mark and expected > limit:
            rows.append([f"{sigma:.4g}", method, "", "", "", f"left out: {choice.notes[method]}"])
            continue
        took, error = _measured(points, sigma, method, mass, signal)
        first = first or took
        rows.append([f"{sigma:.4g}", method + mark, f"{took:.2f}", f"{took / first:.2g}×", f"{error:.0e}", ""])
    return rows


def _measured(points: Tensor, sigma: float, method: str, mass: Tensor | None, signal: Tensor) -> tuple[float, float]:
    """Seconds and error."""
    best, end = math.inf, time.perf_counter() + _BUDGET
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        q = diffusion(points, sigma, mass, method=method, signal=signal)
        best = min(best, time.perf_counter() - start)
    return best, float(q.error())
