"""The picture of `qattn spectrum --plot`."""

from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_modes"]

Array = NDArray[Any]

_MOST = 20_000  # points that are drawn
_MODES = 6


def draw_modes(file: BinaryIO, points: Array, vectors: Array, frequencies: Array) -> None:
    """The first modes after the constant one on the points, and the eigenvalues of the Laplacian, as PNG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--plot needs matplotlib. Install it with `pip install matplotlib`.") from None
    modes = range(min(1, vectors.shape[1] - 1), min(1 + _MODES, vectors.shape[1]))
    figure = Figure(figsize=(2.4 * len(modes) + 3.2, 2.8), layout="constrained")
    axes = figure.subplots(1, len(modes) + 1, width_ratios=[*[2.4] * len(modes), 3.2])
    some = np.random.default_rng(0).permutation(len(points))[:_MOST]
    places, depth = _seen(points[some])
    some, places = some[np.argsort(depth)], places[np.argsort(depth)]  # the nearest last
    size = min(100.0, 2e5 / len(some))  # so that near points hide far ones
    for axis, mode in zip(axes, modes, strict=False):
        level = vectors[some, mode]
        top = float(np.quantile(np.abs(level), 0.99)) or 1.0
        axis.scatter(*places.T, c=level, s=size, cmap="RdBu_r", vmin=-top, vmax=top, linewidths=0)
        axis.set_title(f"mode {mode + 1}", fontsize=9)
        axis.set_aspect("equal")
        axis.axis("off")
    axes[-1].plot(np.arange(1, len(frequencies) + 1), frequencies, ".-", color="0.2", markersize=4, linewidth=0.8)
    axes[-1].set_title("−(2/σ²) log λ, the Laplacian's eigenvalues", fontsize=9)
    axes[-1].set_xlabel("mode", fontsize=9)
    axes[-1].set_ylim(bottom=0)
    figure.savefig(file, format="png", dpi=150)


def _seen(points: Array) -> tuple[Array, Array]:
    """Points in the plane, seen along the shortest side of their box, and how near each is."""
    x = np.pad(points, ((0, 0), (0, max(0, 3 - points.shape[1]))))[:, :3]
    across = int(np.argmin(np.ptp(x, axis=0)))
    right, up, towards = {0: (2, 1, -1), 1: (0, 2, -1), 2: (0, 1, 1)}[across]  # y or z upwards, as most files have it
    return x[:, [right, up]], towards * x[:, across]
