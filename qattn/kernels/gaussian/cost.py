"""Costs of the methods of a Gaussian kernel, and the choice of the cheapest.

| method | computes | cost of a pass |
|---|---|---|
| "exact" | all pairs, by an attention backend | N M |
| "tiles" | pairs of tiles that are near enough to matter | N · pairs in range |
| "fourier" | Fᴴ ĝ F by two non-uniform FFTs, up to three dimensions | N + modes |
"""

import math
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch

from qattn.kernels.gaussian import calibration, exact_rows, fourier
from qattn.kernels.gaussian.prepared import PreparedPoints
from qattn.tiles import gaussian, plain
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.meanwhile import Loop, patience
from qattn.tiles.sizes import TILE

__all__ = ["METHODS", "Choice", "Workload", "choose", "is_known"]

METHODS = ("exact", "tiles", "fourier")
_FEW_PAIRS = 2**24  # up to which methods are not compared
_WORTH_COMPILING = 2**34  # pairs from which one waits for the compiler, and gets the method that is fastest with it
_SAMPLE = 128  # tiles for which near tiles are counted
_ROWS = 64  # rows whose sums are computed


@dataclass(frozen=True)
class _Costs:
    """Costs in nanoseconds of one CPU thread, or of an entire GPU."""

    pair: float  # per pair of points
    tile_pair: float  # to find a pair of near tiles in a tree
    tiled_point: float  # to move a point to its tile and back
    tap: float  # to spread a point to a grid point, and to gather from it
    mode: float
    fourier_point: float  # per point besides its taps: rows that are checked, and channels
    call: dict[str, float]  # per call, at any size
    comparison: float = 0.0  # of two tiles, where all are compared


# Those of CPUs are measured (benchmarks/methods.py). Those of CUDA are estimates from memory bandwidths and a model of
# the machine code (benchmarks/gpu_model.py), for where `calibration` cannot measure them.
_COSTS = {
    "cpu": _Costs(0.24, 200.0, 80.0, 1.3, 120.0, 140.0, {"tiles": 2.5e6, "fourier": 1e7}),
    "cuda": _Costs(0.001, 0.0, 1.0, 0.02, 0.5, 1.0, {"tiles": 5e5, "fourier": 2e6}, comparison=0.01),
}
# Loops that compute a pass on CPUs.
_LOOPS = {"exact": "attend", "tiles": "attend near"}
# Cost of a channel, in passes for lse.
_CHANNEL = {"exact": 0.15, "tiles": 0.15, "fourier": 0.44}


def is_known(device: torch.device) -> bool:
    """Return whether approximate methods run on a device."""
    return device.type in _COSTS


class Workload(NamedTuple):
    """Passes for which costs are compared; by default four for lse, to normalize, and one with eight channels."""

    sums: int = 4
    channels: int = 8

    def passes(self, method: str) -> float:
        """Return the cost in units of one pass for lse with that method."""
        return self.sums + 1 + self.channels * _CHANNEL[method]


@dataclass(frozen=True)
class Choice:
    """A method, and the candidates among which it was chosen.

    Attributes:
        method: Name of the method.
        notes: One note per candidate.
        seconds: Estimated duration of a pass with each candidate.
        forgone: A loop that would be faster if it were compiled, and by how many seconds; or None.
    """

    method: str
    notes: dict[str, str]
    seconds: dict[str, float]
    forgone: tuple[Loop, float] | None = None

    def __str__(self) -> str:
        width = max(map(len, self.notes))
        return "\n".join(
            f"  {name:{width}}  {note}{'   ← taken' if name == self.method else ''}"
            for name, note in self.notes.items()
        )

    def without_fourier(self, reason: str) -> "Choice":
        """Return the choice after "fourier" has failed for a reason."""
        others = {name: seconds for name, seconds in self.seconds.items() if name != "fourier"}
        return Choice(min(others, key=others.__getitem__), self.notes | {"fourier": reason}, self.seconds)


def choose(
    points: PreparedPoints, sigma: float, tol: float, workload: Workload, refusals: dict[str, list[str]]
) -> Choice:
    """Choose the cheapest method for a bandwidth.

    On several ranks, costs are those of the average rank, from numbers that are the same on all ranks.

    Args:
        points: Targets and points of the kernel.
        sigma: Bandwidth.
        tol: Largest acceptable error of lse.
        workload: Passes for which the cost is estimated.
        refusals: Reasons against "fourier" and "tiles"; a method with any is not considered.
    """
    ranks, device = points.ranks, points.device
    num_keys, clouds = sum(points.keys), points.batch.numel()
    N, M = max(1, sum(points.queries) // ranks.size), num_keys // ranks.size
    pairs = N * num_keys * clouds
    costs, origin = _costs(points, is_measured=pairs > _FEW_PAIRS)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    threads = -int(ranks.maximum(torch.tensor(-threads, device=device)))

    compiled: dict[str, tuple[float, Loop]] = {}  # what passes would take by loops for which one waits

    def until_compiled(method: str, seconds: float, by_torch: float) -> float:
        """Return the seconds per pass on this machine, where torch may compute until the loops are compiled."""
        if device.type != "cpu" or why_not_compiled() or pairs > _WORTH_COMPILING:
            return seconds
        loop = gaussian.loop_of(_LOOPS[method], points.clouds[1].dtype, points.dims)
        compiled[method] = workload.passes(method) * seconds, loop
        return min(seconds + patience(loop) / workload.passes(method), by_torch)

    seconds = {
        "exact": until_compiled("exact", 1e-9 * costs.pair * pairs / threads, plain.seconds_for(pairs, points.dims))
    }
    if pairs <= _FEW_PAIRS:
        return Choice("exact", {"exact": f"all {pairs:.1e} pairs: few, other methods not compared"}, seconds)
    notes = {"exact": f"all {pairs:.1e} pairs, {_per_pass(seconds['exact'])}{origin}"}
    notes |= {name: "; ".join(reasons) for name, reasons in refusals.items() if reasons}

    if not refusals["fourier"]:
        extent = (points.extent / sigma).tolist()
        limit = fourier.most_modes(N + M)

        def grid(least_sum: float) -> tuple[float, list[int], int]:
            """Return the error δ, the modes along each axis and their number, for rows that sum to at least this."""
            error = fourier.first_error(tol, least_sum, math.sqrt(num_keys))
            shape = fourier.modes(extent, error)
            return error, shape, math.prod(shape)

        error, shape, count = grid(num_keys)  # no row sums to more
        if count <= limit:
            error, shape, count = grid(_least_sum(points, sigma))
        if count > limit:
            notes["fourier"] = f"at least {count:.1e} modes, more than {limit:.1e}"
        else:
            taps = costs.tap * max(2, round(-math.log10(10 * error)) + 1) ** len(shape)
            cost = (taps + costs.fourier_point) * 0.5 * (N + M) + costs.mode * count
            cost *= clouds * (1 if error >= fourier.SINGLE else 2)
            seconds["fourier"] = 1e-9 * (cost + costs.call["fourier"]) / threads
            notes["fourier"] = f"{' × '.join(map(str, shape))} modes, {_per_pass(seconds['fourier'])}"

    if not refusals["tiles"]:
        # Uniform clouds have the fewest pairs in reach. If even those are too many, there is no need to sort.
        reach = math.sqrt(2 * math.log(1 / min(tol, 0.5)))
        volume = math.prod(max(1.0, side / sigma / reach) for side in points.extent.tolist())
        least = 1e-9 * costs.pair * pairs / volume / threads
        if workload.passes("tiles") * least > 2 * min(workload.passes(name) * t for name, t in seconds.items()):
            notes["tiles"] = f"at least {_per_pass(least)}: too many pairs in reach"
        else:
            tile_pairs, near = _near_pairs(points, sigma, tol)
            if device.type == "cuda":  # whole tiles
                near = TILE**2 * tile_pairs
            compared = N * num_keys * clouds / TILE**2
            cost = costs.pair * near + costs.tile_pair * tile_pairs + costs.tiled_point * N * clouds
            cost += costs.comparison * compared
            by_torch = plain.seconds_for(TILE**2 * tile_pairs, points.dims)
            by_loops = 1e-9 * (cost + costs.call["tiles"]) / threads
            seconds["tiles"] = until_compiled("tiles", by_loops, by_torch)
            notes["tiles"] = f"{near / pairs:.1e} of all pairs, {_per_pass(seconds['tiles'])}"
    best = min(seconds, key=lambda name: workload.passes(name) * seconds[name])
    forgone = None
    if compiled and best not in compiled:
        least, loop = min(compiled.values(), key=itemgetter(0))
        forgone = loop, max(0.0, workload.passes(best) * seconds[best] - least)
    # The same on all ranks, whose estimates may differ by rounding.
    best = METHODS[int(ranks.maximum(torch.tensor(METHODS.index(best), device=device)))]
    return Choice(best, {name: notes[name] for name in METHODS if name in notes}, seconds, forgone)


def _costs(points: PreparedPoints, is_measured: bool) -> tuple[_Costs, str]:
    """Return costs that are the same on all ranks, and a note on their origin; on a GPU those that are measured."""
    device = points.device
    costs = _COSTS.get(device.type, _COSTS["cpu"])
    if device.type != "cuda" or not is_measured:
        return costs, ""
    found = calibration.rates(device)
    estimates = costs.pair, costs.comparison, costs.tiled_point, costs.call["tiles"]
    numbers = torch.tensor(estimates if found is None else found, dtype=torch.float64, device=device)
    pair, comparison, point, call = points.ranks.maximum(numbers).tolist()
    costs = replace(costs, pair=pair, comparison=comparison, tiled_point=point, call=costs.call | {"tiles": call})
    return costs, " (an estimate)" if found is None else " (measured on this GPU)"


def _per_pass(seconds: float) -> str:
    return f"about {seconds:.2g} s per pass"


def _least_sum(points: PreparedPoints, sigma: float) -> float:
    """Compute the least Σ_j K_ij of a few rows, for equal weights."""
    targets, keys, bandwidths = points.flat(torch.tensor(sigma, device=points.device))
    rows = targets[:, :: max(1, -(-targets.shape[1] // _ROWS))]
    clouds = zip(rows, keys, bandwidths, strict=True)
    lse = torch.cat([exact_rows.attend(points.ranks, *cloud, None, None).lse for cloud in clouds])
    return math.exp(-float(points.ranks.highest(-lse)))


def _near_pairs(points: PreparedPoints, sigma: float, tol: float) -> tuple[float, ...]:
    """Estimate the numbers per rank of near pairs of tiles, and of points in near parts of them, for equal biases.

    A rank counts near keys among its own, and assumes the same fraction of near keys on every other rank. That is right
    if the reach is far below or far above the extent of the shards.
    """
    ranks, N, M = points.ranks, *points.shape
    counts = (0.0, 0.0)
    if N and M:
        targets, keys = (cloud.tiling(points.clouds[1].dtype) for cloud in points.sorted(torch.tensor(sigma)))
        tiles, near = plain.count_near(targets, keys, torch.full((targets.clouds,), sigma), tol, _SAMPLE)
        factor = 1 + (ranks.size - 1) * min(1.0, near / (keys.clouds * N * M))
        counts = factor * tiles, factor * near
    sums = ranks.sum(torch.tensor(counts, dtype=torch.float64, device=points.device))
    return tuple((sums / ranks.size).tolist())
