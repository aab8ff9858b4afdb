"""The command `qattn bench`."""

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
from qattn.cli.arguments import FILE_HELP, SIGMA_HELP, read_cloud
from qattn.cli.command import counted
from qattn.io import Cloud
from qattn.io.lengths import parse_sigma
from qattn.kernels import GaussianKernel
from qattn.kernels.gaussian.kernel import MethodName
from qattn.operators.diffusion import diffuse
from qattn.shapes import creature

__all__ = ["bench"]

_SIGMAS = ["3x", "2%", "10%"]
_NUM_CHANNELS = 8
_NUM_PASSES = 6  # about what normalizing and applying take, to predict the seconds of a method
_BUDGET = 1.0  # seconds for which a measurement is repeated; the best counts


def bench(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=f"{FILE_HELP} Default: a generated surface.")
    ] = None,
    points: Annotated[int, typer.Option(metavar="N", help="Number of points of the generated surface.")] = 100_000,
    sigma: Annotated[list[str], typer.Option(metavar="SIGMA", help=f"{SIGMA_HELP} Repeatable.")] = _SIGMAS,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Skip methods that are expected to take longer.")
    ] = 60.0,
) -> None:
    """Compare the speed and accuracy of the methods of the Gaussian kernel on this machine.

    Seconds are for building, normalizing and applying the operator to 8 channels. Errors are those of 256 random row
    sums against all pairs. The method that `method="auto"` selects is marked. Splats are taken as points.
    """
    _checks.positive("--limit", limit)
    _checks.integer("--points", points, 1000)
    cloud = Cloud(creature(points)[0].double().numpy()) if file is None else read_cloud(file)
    lengths = [parse_sigma(text, cloud) for text in sigma]
    x = torch.from_numpy(cloud.points)
    mass = None if cloud.mass is None else torch.from_numpy(cloud.mass)
    signal = torch.randn(len(x), _NUM_CHANNELS, generator=torch.Generator().manual_seed(0))
    table = Table("σ", "method", "seconds", "relative to auto", "error", "remark")
    for column in (0, 2, 3, 4):
        table.columns[column].justify = "right"
    with Console(stderr=True).status("compiling") as status:
        for method in ("exact", "tiles", "fourier"):
            diffuse(x[:500], lengths[-1], signal[:500], method=method)
        for length in lengths:
            status.update(f"σ = {length:.4g}")
            for row in _rows(x, length, mass, signal, limit):
                table.add_row(*row)
            table.add_section()
    threads = counted(torch.get_num_threads(), "thread")
    typer.echo(f"{counted(len(x), 'point')}, {threads}, torch {torch.__version__}")
    Console().print(table)


def _rows(points: Tensor, sigma: float, mass: Tensor | None, signal: Tensor, limit: float) -> list[list[str]]:
    """Measure all methods; the one that "auto" selects comes first, and the others are compared with it."""
    (choice,) = GaussianKernel(points, sigma).choices()
    rows, auto_seconds = [], 0.0
    for method in sorted(choice.notes, key=lambda name: name != choice.method):
        mark = " ← auto" if method == choice.method else ""
        if not mark and _NUM_PASSES * choice.seconds.get(method, math.inf) > limit:
            rows.append([f"{sigma:.4g}", method, "", "", "", f"skipped: {choice.notes[method]}"])
            continue
        seconds, error = _measure(points, sigma, method, mass, signal)
        auto_seconds = auto_seconds or seconds
        ratio = f"{seconds / auto_seconds:.2g}×"
        rows.append([f"{sigma:.4g}", method + mark, f"{seconds:.2f}", ratio, f"{error:.0e}", ""])
    return rows


def _measure(
    points: Tensor, sigma: float, method: MethodName, mass: Tensor | None, signal: Tensor
) -> tuple[float, float]:
    """Return seconds and error of a method."""
    best, end = math.inf, time.perf_counter() + _BUDGET
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        _, q = diffuse(points, sigma, signal, mass, method=method)
        best = min(best, time.perf_counter() - start)
    return best, float(q.kernel_error())
