"""`qattn demo`."""

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
from qattn.cli.speaking import one_sentence
from qattn.io.writing import can_write
from qattn.kernels import GaussianKernel
from qattn.operators import Diffusion, diffusion
from qattn.pictures import figure, heat, render, show, signed
from qattn.shapes import creature
from qattn.spectral import eigsh

__all__ = ["demo"]

T = TypeVar("T")

_FEW, _FEW_SIGMA = 20_000, 0.05  # of which modes are computed
_SIGMAS = 0.01, 0.1  # of the large cloud: by tiles and by FFTs
_MODES, _SHOWN = 16, (2, 4, 8, 13)


class _Row(NamedTuple):
    """What was done, and how well."""

    what: str
    points: int
    sigma: float
    method: str
    seconds: float
    error: float | None


def demo(
    out: Annotated[Path, typer.Option("--output", "-o", metavar="PNG", help="The picture.")] = Path("demo.png"),
    points: Annotated[int, typer.Option(metavar="N", help="How many points the large cloud has.")] = 1_000_000,
) -> None:
    """Diffuse noise on a million points, compute the modes of a shape, print figures and draw a picture.

    Seconds are those of building, normalising and applying, or of all eigenpairs. Errors are those of row sums against
    all pairs, on 256 random rows, or the largest residual of an eigenpair. The first run compiles, before clocks start.
    """
    from tqdm import tqdm

    shown = tqdm(desc="spreading points", total=8, disable=None, leave=False, bar_format="{l_bar}{bar}| {elapsed}")
    with one_sentence(), shown as bar:

        def step(what: str) -> None:
            """What comes next; what came before is done."""
            bar.update()
            bar.set_description(what)

        can_write(out, (".png",))
        picture = figure(15, 5.6)  # here, so that a missing library is known at once
        axes = picture.subplots(2, 4).flat
        start = time.perf_counter()
        places, normals = creature(_checks.integer("--points", points, 1000))
        few = creature(min(_FEW, points), seed=1)[0]
        noise = torch.randn(points, 3, generator=torch.Generator().manual_seed(0))
        width = min(800, int(0.7 * points**0.5))  # so that no gaps are seen between points

        def draw(colours: Tensor, title: str) -> None:
            show(next(axes), render(places, normals, colours, width), title)

        step("compiling")
        for method in ("exact", "tiles", "fourier"):
            diffusion(few[:500], 0.3, method=method, signal=few[:500])
        draw(_spread(noise), f"noise on {points:,} points")
        rows = []
        for sigma in _SIGMAS:
            step(f"{points:,} points, σ = {sigma:g}")
            row, q = _diffused(places, sigma, noise)
            rows.append(row)
            draw(_spread(q.applied), f"diffused, σ = {sigma:g}")

        step(f"{len(few):,} points")
        row, q = _diffused(few, _FEW_SIGMA, noise[: len(few)])
        rows.append(row)
        step(f"{_MODES} modes")
        spectrum, took = _timed(lambda: eigsh(q, _MODES))
        rows.append(row._replace(what=f"{_MODES} modes", seconds=took, error=float(spectrum.residuals.amax())))
        step(f"modes at {points:,} points")
        dirac = torch.zeros(len(few))
        dirac[few[:, 0].argmax()] = len(few)
        columns = torch.column_stack([q.power(20, dirac), spectrum.vectors / spectrum.values])
        there, took = _timed(lambda: q.extend(places) @ columns)
        rows.append(_Row("their extension", points, _FEW_SIGMA, "", took, None))
        step("drawing")
        draw(heat(there[:, 0]), "a Dirac on the nose, 20 steps of Q")
        for mode in _SHOWN:
            draw(signed(there[:, mode]), f"mode {mode} of Q")
        with io.replacing(out) as file:
            picture.savefig(file, format="png", dpi=110)
    _print(rows)
    typer.echo(f"{out}: written, {time.perf_counter() - start:.0f} s in all")


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def _diffused(points: Tensor, sigma: float, signal: Tensor) -> tuple[_Row, Diffusion]:
    start = time.perf_counter()
    kernel = GaussianKernel(points, sigma)
    q = diffusion(kernel, signal=signal)
    took = time.perf_counter() - start
    return _Row("diffusion", len(points), sigma, str(kernel.method), took, float(q.error())), q


def _spread(signal: Tensor) -> Tensor:
    """Three channels as colours, about grey."""
    centred = signal - signal.mean(0)
    return 0.5 + centred / (5 * centred.std(0))


def _print(rows: list[_Row]) -> None:
    table = Table("", *("points", "σ", "method", "seconds", "error"))
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
    for row in rows:
        error = "" if row.error is None else f"{row.error:.0e}"
        table.add_row(row.what, f"{row.points:,}", f"{row.sigma:g}", row.method, f"{row.seconds:.2f}", error)
    Console().print(table)
