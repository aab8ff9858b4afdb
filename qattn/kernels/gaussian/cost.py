"""Costs of the methods of a Gaussian kernel, and the choice of the cheapest.

| method | computes | cost of a pass |
|---|---|---|
| "exact" | all pairs, by an attention backend | N M |
| "tiles" | pairs of tiles that are near enough to matter | N · pairs in range |
| "fourier" | Fᴴ ĝ F by two non-uniform FFTs, up to three dimensions | N + modes |
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from qattn.kernels.gaussian import calibration, exact_rows, fourier
from qattn.kernels.gaussian.prepared import PreparedPoints
from qattn.tiles import by_torch, gaussian
from qattn.tiles.sizes import TILE
from qattn.tiles.when_to_compile import Loop, seconds_until_due

__all__ = ["METHODS", "Choice", "Method", "Workload", "choose", "is_known"]

Method = Literal["exact", "tiles", "fourier"]
METHODS: tuple[Method, ...] = ("exact", "tiles", "fourier")
_FEW_PAIRS = 2**24  # up to this many pairs, methods are not compared
_WORTH_COMPILING = 2**34  # above this many pairs, compile first and compare compiled methods
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
    comparison: float = 0.0  # per pair of tiles, where all pairs are compared


# For CPUs they are measured (benchmarks/methods.py). For CUDA they are estimates from memory bandwidths and a model of
# the machine code (benchmarks/gpu_model.py), used where `calibration` cannot measure.
_COSTS = {
    "cpu": _Costs(0.24, 200.0, 80.0, 1.3, 120.0, 140.0, {"tiles": 2.5e6, "fourier": 1e7}),
    "cuda": _Costs(0.001, 0.0, 1.0, 0.02, 0.5, 1.0, {"tiles": 5e5, "fourier": 2e6}, comparison=0.01),
}
# Loops that compute a pass on CPUs.
_LOOPS: dict[Method, str] = {"exact": "attend", "tiles": "attend near"}
# Cost of a channel, in passes for lse.
_CHANNEL: dict[Method, float] = {"exact": 0.15, "tiles": 0.15, "fourier": 0.44}


def is_known(device: torch.device) -> bool:
    """Return whether approximate methods run on a device."""
    return device.type in _COSTS


class Workload(NamedTuple):
    """Passes for which costs are compared; by default four for lse, to normalize, and one with eight channels."""

    sums: int = 4
    channels: int = 8

    def passes(self, method: Method) -> float:
        """Return the cost in units of one pass for lse with that method."""
        return self.sums + 1 + self.channels * _CHANNEL[method]


@dataclass(frozen=True)
class Choice:
    """A method, and the candidates among which it was chosen.

    Attributes:
        method: Name of the method.
        notes: One note per candidate.
        seconds: Estimated duration of a pass with each candidate.
        missed: A loop that would be faster if it were compiled, and by how many seconds; or None.
    """

    method: Method
    notes: dict[Method, str]
    seconds: dict[Method, float]
    missed: tuple[Loop, float] | None = None

    def __str__(self) -> str:
        width = max(map(len, self.notes))
        return "\n".join(
            f"  {name:{width}}  {note}{'   ← taken' if name == self.method else ''}"
            for name, note in self.notes.items()
        )

    def without_fourier(self, reason: str) -> "Choice":
        """Return the choice after "fourier" has failed for a reason."""
        others: dict[Method, float] = {name: t for name, t in self.seconds.items() if name != "fourier"}
        return Choice(min(others, key=others.__getitem__), self.notes | {"fourier": reason}, self.seconds)


@dataclass(frozen=True)
class _Cloud:
    """The numbers on which all estimates depend, the same on all ranks.

    Attributes:
        points: Targets and points of the kernel.
        sigma: Bandwidth.
        tol: Largest acceptable error of lse.
        workload: Passes for which the cost is estimated.
        costs: Costs on this device.
        threads: Threads of a CPU; 1 on other devices.
        waits: By the method, seconds for which its loops are avoided (`seconds_until_due`).
    """

    points: PreparedPoints
    sigma: float
    tol: float
    workload: Workload
    costs: _Costs
    threads: int
    waits: dict[Method, float]

    @property
    def rows(self) -> int:
        """Number of targets of the average rank."""
        return max(1, sum(self.points.queries) // self.points.ranks.size)

    @property
    def keys(self) -> int:
        """Number of points of all ranks."""
        return sum(self.points.keys)

    @property
    def clouds(self) -> int:
        return self.points.batch.numel()

    @property
    def pairs(self) -> int:
        return self.rows * self.keys * self.clouds

    def seconds(self, nanoseconds: float) -> float:
        """Convert nanoseconds on one thread to seconds on all."""
        return 1e-9 * nanoseconds / self.threads

    def until_compiled(self, method: Method, by_loops: float, by_torch: float) -> "_Estimate":
        """Estimate a pass from nanoseconds on one thread: by loops after a wait for the compiler, or by torch."""
        seconds = self.seconds(by_loops)
        if self.points.device.type != "cpu" or self.waits[method] == torch.inf or self.pairs > _WORTH_COMPILING:
            return _Estimate(seconds)
        with_wait = seconds + self.waits[method] / self.workload.passes(method)
        return _Estimate(min(with_wait, self.seconds(by_torch)), seconds)


class _Estimate(NamedTuple):
    """Seconds per pass, now and once the loops of the method are compiled; None if there is nothing to compile."""

    seconds: float
    once_compiled: float | None = None

    def __str__(self) -> str:
        return f"about {self.seconds:.2g} s per pass"


def choose(
    points: PreparedPoints, sigma: float, tol: float, workload: Workload, refusals: dict[Method, list[str]]
) -> Choice:
    """Choose the cheapest method for a bandwidth.

    On several ranks, costs are for the average rank, from numbers that are the same on all ranks.

    Args:
        points: Targets and points of the kernel.
        sigma: Bandwidth.
        tol: Largest acceptable error of lse.
        workload: Passes for which the cost is estimated.
        refusals: Reasons against "fourier" and "tiles"; a method with any is not considered.
    """
    threads, waits, refusals = _agreed(points, refusals)
    cloud = _Cloud(points, sigma, tol, workload, _COSTS.get(points.device.type, _COSTS["cpu"]), threads, waits)
    pairs, origin = cloud.pairs, ""
    if points.device.type == "cuda" and pairs > _FEW_PAIRS:
        costs, origin = _measured(points, cloud.costs)
        cloud = replace(cloud, costs=costs)
    estimates: dict[Method, _Estimate] = {"exact": _exact(cloud)}
    if pairs <= _FEW_PAIRS:
        note = f"all {pairs:.1e} pairs: few, other methods not compared"
        return Choice("exact", {"exact": note}, {"exact": estimates["exact"].seconds})

    def total(name: Method) -> float:
        return workload.passes(name) * estimates[name].seconds

    notes: dict[Method, str] = {"exact": f"all {pairs:.1e} pairs, {estimates['exact']}{origin}"}
    for name, reasons in refusals.items():
        if reasons:
            notes[name] = "; ".join(reasons)
            continue
        limit = min(map(total, estimates))
        found, notes[name] = _fourier(cloud) if name == "fourier" else _tiles(cloud, limit)
        if found is not None:
            estimates[name] = found
    best = METHODS.index(min(estimates, key=total))
    # The same on all ranks, whose estimates may differ by rounding.
    method = METHODS[int(points.ranks.maximum(torch.tensor(best, device=points.device)))]
    seconds = {name: estimate.seconds for name, estimate in estimates.items()}
    notes = {name: notes[name] for name in METHODS if name in notes}
    return Choice(method, notes, seconds, _missed(cloud, method, estimates))


def _agreed(
    points: PreparedPoints, refusals: dict[Method, list[str]]
) -> tuple[int, dict[Method, float], dict[Method, list[str]]]:
    """Return the number of threads, the waits for loops and the refusals that all ranks have in common."""
    ranks, device = points.ranks, points.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    waits = [seconds_until_due(_loop(points, method)) for method in _LOOPS]
    are_refused = [float(bool(reasons)) for reasons in refusals.values()]
    own = torch.tensor([-threads, *waits, *are_refused], dtype=torch.float64, device=device)
    least, *waits, by_fourier, by_tiles = ranks.maximum(own).tolist()
    common = {
        name: reasons or (["another rank cannot use it"] if is_refused else [])
        for (name, reasons), is_refused in zip(refusals.items(), (by_fourier, by_tiles), strict=True)
    }
    return -int(least), dict(zip(_LOOPS, waits, strict=True)), common


def _loop(points: PreparedPoints, method: Method) -> Loop:
    return gaussian.loop_of(_LOOPS[method], points.clouds[1].dtype, points.dims)


def _missed(cloud: _Cloud, best: Method, estimates: dict[Method, _Estimate]) -> tuple[Loop, float] | None:
    """Return the loop that would be the fastest if it were compiled, and by how many seconds, if the best has none."""
    passes = cloud.workload.passes
    compiled = {name: passes(name) * x.once_compiled for name, x in estimates.items() if x.once_compiled is not None}
    if best in compiled or not compiled:
        return None
    name = min(compiled, key=compiled.__getitem__)
    return _loop(cloud.points, name), max(0.0, passes(best) * estimates[best].seconds - compiled[name])


def _exact(cloud: _Cloud) -> _Estimate:
    pairs = cloud.pairs
    return cloud.until_compiled("exact", cloud.costs.pair * pairs, by_torch.nanoseconds(pairs, cloud.points.dims))


def _fourier(cloud: _Cloud) -> tuple[_Estimate | None, str]:
    """Estimate a pass of "fourier"; None if it needs too many modes. Return a note too."""
    points, keys, costs = cloud.points, cloud.keys, cloud.costs
    count = cloud.rows + keys // points.ranks.size  # points of the average rank
    extent, limit = (points.extent / cloud.sigma).tolist(), fourier.most_modes(count)

    def grid(least_sum: float) -> tuple[float, list[int]]:
        """Return the error δ and the modes along each axis, for rows that sum to at least this."""
        error = fourier.first_error(cloud.tol, least_sum, math.sqrt(keys))
        return error, fourier.modes(extent, error)

    error, shape = grid(keys)  # no row sums to more
    if math.prod(shape) <= limit:
        error, shape = grid(_least_sum(points, cloud.sigma))
    modes = math.prod(shape)
    if modes > limit:
        return None, f"at least {modes:.1e} modes, more than {limit:.1e}"
    taps = costs.tap * max(2, round(-math.log10(10 * error)) + 1) ** len(shape)
    cost = (taps + costs.fourier_point) * 0.5 * count + costs.mode * modes
    cost *= cloud.clouds * (1 if error >= fourier.SINGLE else 2)
    estimate = _Estimate(cloud.seconds(cost + costs.call["fourier"]))
    return estimate, f"{' × '.join(map(str, shape))} modes, {estimate}"


def _tiles(cloud: _Cloud, limit: float) -> tuple[_Estimate | None, str]:
    """Estimate a pass of "tiles"; None if all passes take far longer than a limit in seconds. Return a note too."""
    points, costs, pairs = cloud.points, cloud.costs, cloud.pairs
    # Uniform clouds have the fewest pairs in reach. If even those are too many, there is no need to sort.
    reach = math.sqrt(2 * math.log(1 / min(cloud.tol, 0.5)))
    volume = math.prod(max(1.0, side / cloud.sigma / reach) for side in points.extent.tolist())
    least = _Estimate(cloud.seconds(costs.pair * pairs / volume))
    if cloud.workload.passes("tiles") * least.seconds > 2 * limit:
        return None, f"at least {least}: too many pairs in reach"
    tile_pairs, near = _near_pairs(points, cloud.sigma, cloud.tol)
    if points.device.type == "cuda":  # whole tiles
        near = TILE**2 * tile_pairs
    cost = costs.pair * near + costs.tile_pair * tile_pairs + costs.tiled_point * cloud.rows * cloud.clouds
    cost += costs.comparison * pairs / TILE**2 + costs.call["tiles"]
    estimate = cloud.until_compiled("tiles", cost, by_torch.nanoseconds(TILE**2 * tile_pairs, points.dims))
    return estimate, f"{near / pairs:.1e} of all pairs, {estimate}"


def _measured(points: PreparedPoints, costs: _Costs) -> tuple[_Costs, str]:
    """Return costs as measured on a GPU, the same on all ranks, and a note on their origin."""
    device = points.device
    found = calibration.rates(device)
    estimates = costs.pair, costs.comparison, costs.tiled_point, costs.call["tiles"]
    numbers = torch.tensor(estimates if found is None else found, dtype=torch.float64, device=device)
    pair, comparison, point, call = points.ranks.maximum(numbers).tolist()
    costs = replace(costs, pair=pair, comparison=comparison, tiled_point=point, call=costs.call | {"tiles": call})
    return costs, " (an estimate)" if found is None else " (measured on this GPU)"


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
        tiles, near = by_torch.count_near(targets, keys, torch.full((targets.clouds,), sigma), tol, _SAMPLE)
        factor = 1 + (ranks.size - 1) * min(1.0, near / (keys.clouds * N * M))
        counts = factor * tiles, factor * near
    sums = ranks.sum(torch.tensor(counts, dtype=torch.float64, device=points.device))
    return tuple((sums / ranks.size).tolist())
