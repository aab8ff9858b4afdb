"""Costs of passes on a GPU, measured once for each device and kept on disk.

A pass over all pairs, and passes over near tiles of points on a line at three sizes, give the cost of a pair of points,
of a comparison of two tiles, of a point and of a call. How long that takes has not been measured.
"""

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from qattn._versions import __version__
from qattn.attention.dispatch import reasons_against
from qattn.attention.inputs import Inputs
from qattn.tiles import device as on_device
from qattn.tiles.cache import cache_folder
from qattn.tiles.device import Cutoff, DeviceTiling
from qattn.tiles.sizes import TILE

__all__ = ["Rates", "rates"]

_PAIRS = 2**16  # points of the cloud whose pairs are all computed
_LINES = 2**13, 2**16, 2**19  # points on a line: calls, points and comparisons take most of the time
_RUNS = 3


class Rates(NamedTuple):
    """Costs in nanoseconds."""

    pair: float  # of points
    comparison: float  # of two tiles
    point: float
    call: float


@functools.cache
def rates(device: torch.device) -> Rates | None:
    """Return the costs of the `triton` backend on a device, from disk or measured; None if it does not run there."""
    points = torch.zeros(1, 1, 3, device=device)
    if reasons_against("triton", Inputs(points, points)):
        return None
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, qattn {__version__}"
    folder = cache_folder()
    path = None if folder is None else folder / "costs.json"
    kept = {} if path is None else _read(path)
    if name not in kept:
        kept[name] = list(_measured(device))
        if path is not None:
            with suppress(OSError):
                path.write_text(json.dumps(kept))
    return Rates(*kept[name])


def _read(path: Path) -> dict[str, list[float]]:
    """Read earlier measurements by name; none if the file is missing or damaged."""
    try:
        kept = json.loads(path.read_text())
        return {str(name): [float(x) for x in Rates(*numbers)] for name, numbers in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _measured(device: torch.device) -> Rates:
    sigma = torch.full((1,), 0.1, device=device)
    own = torch.Generator().manual_seed(0)  # the numbers of the user do not change
    cloud = DeviceTiling(torch.rand(1, _PAIRS, 3, generator=own).to(device))
    pair = _seconds(lambda: on_device.attend(cloud, cloud, sigma, None, None), device) / _PAIRS**2

    def line(size: int) -> float:
        """Time a pass over points on a line, where only the same and adjacent tiles are near."""
        x = torch.arange(size, device=device, dtype=torch.float32)[None, :, None].expand(-1, -1, 3)
        tiling, cutoff = DeviceTiling(x, torch.arange(size, device=device)[None]), Cutoff(1e-3, {})
        return _seconds(lambda: on_device.attend(tiling, tiling, sigma, None, None, cutoff), device)

    # The parabola through three times: call + point n + comparison (n / TILE)².
    (a, b, c), (few, some, many) = _LINES, map(line, _LINES)
    slope = (some - few) / (b - a)
    square = ((many - some) / (c - b) - slope) / (c - a)
    point = slope - square * (a + b)
    costs = pair, square * TILE**2, point, few - point * a - square * a**2
    return Rates(*(1e9 * max(0.0, x) for x in costs))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the best of a few runs, after one that may compile."""
    run()
    best = float("inf")
    for _ in range(_RUNS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
