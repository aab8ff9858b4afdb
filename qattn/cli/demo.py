"""The command `qattn demo`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qattn import _checks, io
from qattn.io.writing import check_target
from qattn.kernels import GaussianKernel
from qattn.operators.diffusion import Diffusion, diffuse
from qattn.pictures import figure, heat, render, show, signed
from qattn.shapes import creature
from qattn.spectra import eigsh

__all__ = ["demo"]

T = TypeVar("T")

_NUM_COARSE, _COARSE_SIGMA = 20_000, 0.05  # the cloud whose modes are computed
_SIGMAS = 0.01, 0.1  # of the large cloud: by tiles and by FFTs
_NUM_MODES, _SHOWN_MODES = 16, (2, 4, 8, 13)


class _Row(NamedTuple):
    """A row of the printed table."""

    task: str
    num_points: int
    sigma: float
    method: str
    seconds: float
    error: float | None


def demo(
    out: Annotated[Path, typer.Option("--output", "-o", metavar="PNG", help="Output file: .png.")] = Path("demo.png"),
    points: Annotated[int, typer.Option(metavar="N", help="Number of points of the large cloud.")] = 1_000_000,
) -> None:
    """Diffuse noise on a million points, compute the modes of a shape, and draw the results.

    Prints seconds and errors. Seconds are for building, normalizing and applying an operator, or for all eigenpairs,
    after compilation. Errors are those of 256 random row sums against all pairs, or the largest residual of an
    eigenpair.
    """
    from tqdm import tqdm

    start = time.perf_counter()
    check_target(out, (".png",))
    _checks.integer("--points", points, 1000)
    picture = figure(15, 5.6)  # first, so that a missing library is reported at once
    axes = picture.subplots(2, 4).flat
    with tqdm(desc="sampling", total=8, disable=None, leave=False, bar_format="{l_bar}{bar}| {elapsed}") as bar:

        def begin(task: str) -> None:
            bar.update()
            bar.set_description(task)

        def draw(colors: Tensor, title: str) -> None:
            show(next(axes), render(fine, normals, colors, width), title)

        fine, normals = creature(points)
        coarse = creature(min(_NUM_COARSE, points), seed=1)[0]
        noise = torch.randn(points, 3, generator=torch.Generator().manual_seed(0))
        width = min(800, int(0.7 * points**0.5))  # no gaps between points
        begin("compiling")
        for method in ("exact", "tiles", "fourier"):
            diffuse(coarse[:500], 0.3, coarse[:500], method=method)
        draw(_as_colors(noise), f"noise on {points:,} points")
        rows = []
        for sigma in _SIGMAS:
            begin(f"{points:,} points, σ = {sigma:g}")
            row, smooth, _ = _diffuse(fine, sigma, noise)
            rows.append(row)
            draw(_as_colors(smooth), f"diffused, σ = {sigma:g}")

        begin(f"{len(coarse):,} points")
        row, _, q = _diffuse(coarse, _COARSE_SIGMA, noise[: len(coarse)])
        rows.append(row)
        begin(f"{_NUM_MODES} modes")
        spectrum, seconds = _timed(lambda: eigsh(q, _NUM_MODES))
        error = float(spectrum.residuals.amax())
        rows.append(row._replace(task=f"{_NUM_MODES} modes", seconds=seconds, error=error))
        begin(f"modes at {points:,} points")
        dirac = torch.zeros(len(coarse))
        dirac[coarse[:, 0].argmax()] = len(coarse)
        columns = torch.column_stack([q.power(20, dirac), spectrum.vectors / spectrum.values])
        extended, seconds = _timed(lambda: q.extend(fine) @ columns)
        rows.append(_Row("extended modes", points, _COARSE_SIGMA, "", seconds, None))
        begin("drawing")
        draw(heat(extended[:, 0]), "Dirac on the nose, 20 steps")
        for mode in _SHOWN_MODES:
            draw(signed(extended[:, mode]), f"mode {mode} of Q")
        with io.atomic_write(out) as file:
            picture.savefig(file, format="png", dpi=110)
    _print_table(rows)
    typer.echo(f"{out}: written, {time.perf_counter() - start:.0f} s in total")


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def _diffuse(points: Tensor, sigma: float, signal: Tensor) -> tuple[_Row, Tensor, Diffusion]:
    start = time.perf_counter()
    kernel = GaussianKernel(points, sigma)
    smooth, q = diffuse(kernel, None, signal)
    seconds = time.perf_counter() - start
    return _Row("diffusion", len(points), sigma, str(kernel.method), seconds, float(q.kernel_error())), smooth, q


def _as_colors(signal: Tensor) -> Tensor:
    """Convert three channels (N, 3) to colors around gray."""
    centered = signal - signal.mean(0)
    return 0.5 + centered / (5 * centered.std(0))


def _print_table(rows: list[_Row]) -> None:
    table = Table("task", "points", "σ", "method", "seconds", "error")
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
    for row in rows:
        error = "" if row.error is None else f"{row.error:.0e}"
        table.add_row(row.task, f"{row.num_points:,}", f"{row.sigma:g}", row.method, f"{row.seconds:.2f}", error)
    Console().print(table)
