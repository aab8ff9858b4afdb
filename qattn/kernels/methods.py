"""How a Gaussian kernel is computed: each bandwidth by the cheapest method that meets the tolerance, prepared once.

| method | what it computes | cost of a pass |
|---|---|---|
| "exact" | all pairs, by an attention backend | N M |
| "tiles" | pairs of tiles that are near enough to matter | N · pairs in range |
| "fourier" | Fᴴ ĝ F by two non-uniform FFTs, up to three dimensions | N + modes |
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from qattn import _checks
from qattn._compiled import why_not_compiled
from qattn.attention.backend import Engine
from qattn.attention.native import cutoff, in_base_2, scale_of
from qattn.kernels import fourier, tiles
from qattn.kernels.fourier import Fourier, FourierError
from qattn.kernels.prepared import rows_attended
from qattn.kernels.sites import Sites
from qattn.kernels.tiles import SortedCloud, Tiles
from qattn.tiling import PART, TILE

__all__ = ["METHODS", "Choice", "Instead", "Maker", "Methods", "Work"]

Instead = Callable[[FourierError], Engine]  # what is to be done where FFTs are not exact enough
Maker = Callable[[str, Tensor, Instead | None], Engine | None]  # the engine of a method for some bandwidths

METHODS = ("exact", "tiles", "fourier")
_FEW_DIMENSIONS = 4  # in which tiles pay off
_FEW_PAIRS = 2**24  # for which nothing is worth a thought
_SAMPLE = 128  # tiles whose near ones are counted
_ROWS = 64  # whose sums are looked at


@dataclass(frozen=True)
class _Costs:
    """Nanoseconds of one thread on a CPU, or of the whole of a GPU."""

    pair: float  # of points
    tile_pair: float  # of near tiles, to find them
    tiled_point: float  # to move it to its tile and back
    tap: float  # of a grid point that a point is spread to, and gathered from
    mode: float
    fourier_point: float  # besides its taps: the rows that are checked, and channels
    call: dict[str, float]  # whatever the size


# The CPU's are measured (benchmarks/methods.py). No CUDA device was at hand: those are estimates from bandwidths.
_COSTS = {
    "cpu": _Costs(0.24, 200.0, 80.0, 1.3, 120.0, 140.0, {"tiles": 2.5e6, "fourier": 1e7}),
    "cuda": _Costs(0.002, 20.0, 1.0, 0.02, 0.5, 1.0, {"tiles": 2e6, "fourier": 2e6}),
}
# What a channel adds to a pass, in passes for lse.
_CHANNEL = {"exact": 0.15, "tiles": 0.15, "fourier": 0.44}


class Work(NamedTuple):
    """What a kernel is for: to normalise an operator, with four passes for lse, and to apply it to eight channels."""

    sums: int = 4
    channels: int = 8

    def cost(self, method: str) -> float:
        """In passes for lse by that method."""
        return self.sums + 1 + self.channels * _CHANNEL[method]


@dataclass(frozen=True)
class Choice:
    """A method, and for each of them what speaks for or against it and the seconds that a pass should take."""

    method: str
    notes: dict[str, str]
    seconds: dict[str, float]

    def __str__(self) -> str:
        width = max(map(len, self.notes))
        return "\n".join(
            f"  {name:{width}}  {note}{'   ← taken' if name == self.method else ''}"
            for name, note in self.notes.items()
        )


class Methods:
    """The methods of a Gaussian kernel between the targets and points of some sites, one for each bandwidth.

    Args:
        sites: Where the kernel is.
        sigma: The bandwidth, without axes or (H,).
        method: One of `METHODS` or "auto".
        tol: The largest error of lse that is acceptable.
        backend: Which attention backend; those that "tiles" does not know leave only "exact".
        work: What it is for.
        make: What makes the engines of a cloud that lies on several ranks.
    """

    def __init__(
        self,
        sites: Sites,
        sigma: Tensor,
        method: str,
        tol: float,
        backend: str,
        work: Work,
        make: Maker | None = None,
    ) -> None:
        _checks.one_of("method", method, ("auto", *METHODS))
        self._sites, self._sigma = sites, sigma.detach()
        self._method, self._tol, self._backend, self._work = method, tol, backend, work
        self._make = partial(_made, sites, backend) if make is None else make
        self._engines: dict[str, Engine | None] = {}
        self._counted: tuple[SortedCloud, SortedCloud] | None = None  # the last whose near tiles were counted
        self._given_up: dict[int, str] = {}  # heads for which fourier has been tried in vain, and why
        if method in METHODS:
            for reason in self._reasons(method):
                raise ValueError(f'`method="{method}"` cannot be used here: {reason}.')

    def _reasons(self, method: str) -> list[str]:
        """Why a method cannot be used, whatever the bandwidth."""
        device, d = self._sites.device.type, self._sites.dims
        reasons = []
        if method == "fourier":
            if d > fourier.DIMENSIONS:
                reasons.append(f"it takes up to {fourier.DIMENSIONS} dimensions, and these points have {d}")
            if self._backend != "auto":
                reasons.append(f'it uses no attention backend, and `backend="{self._backend}"` was asked for')
        if method == "tiles" and self._backend not in ("auto", *tiles.BACKENDS):
            reasons.append(f'it takes the backends {" and ".join(tiles.BACKENDS)}, not "{self._backend}"')
        by_flex = self._backend == "flex" or (self._backend == "auto" and device == "cuda")
        if method == "tiles" and by_flex and self._sites.dtype == torch.float64:
            reasons.append("it goes by FlexAttention, which does not take float64")
        if method == "tiles" and (reason := why_not_compiled()):
            reasons.append(reason)
        if method != "exact" and device not in _COSTS:
            reasons.append(f"it takes points on cpu or cuda, and these are on {device}")
        if method == "fourier" and device == "cuda" and find_spec("cufinufft") is None:
            reasons.append("cufinufft is not installed: `pip install cufinufft`")
        return reasons

    @cached_property
    def choices(self) -> list[Choice]:
        """The choice for each bandwidth."""
        return [self._choose(head, float(sigma)) for head, sigma in enumerate(self._sigma.reshape(-1))]

    @property
    def chosen(self) -> list[Choice] | None:
        """The choices as far as they are made; None if they are still to be made, which ranks do together."""
        return self.choices if self._method != "auto" else self.__dict__.get("choices")

    @property
    def groups(self) -> list[tuple[Tensor | None, Engine | None]]:
        """The heads of each method in use, None for all of them, and their engine, None for "exact"."""
        methods = [choice.method for choice in self.choices]
        groups: list[tuple[Tensor | None, Engine | None]] = []
        for method in dict.fromkeys(methods):
            heads = [head for head, name in enumerate(methods) if name == method]
            index = None if len(heads) == len(methods) else torch.tensor(heads, device=self._sites.device)
            if method not in self._engines:
                self._engines[method] = self._engine(method, index)
            groups.append((index, self._engines[method]))
        return groups

    def _engine(self, method: str, heads: Tensor | None) -> Engine | None:
        sigma = self._sigma if heads is None else self._sigma[heads]
        counted, self._counted = self._counted, None
        if method == "tiles" and counted and sigma.ndim == 0 and self._sites.ranks.is_alone:
            return Tiles(*counted, self._backend)
        tiles = partial(self._make, "tiles", sigma, None)
        # Engines are kept here: if they kept this, memory would wait for Python's collector.
        instead = partial(_instead_of_fourier, weakref.ref(self), tiles, heads) if self._method == "auto" else None
        return self._make(method, sigma, instead)

    def _give_up_fourier(self, heads: Tensor | None, why: str) -> None:
        """Takes no FFTs for some heads again, after an error that only computing has shown."""
        numbers = range(len(self.choices)) if heads is None else heads.tolist()
        self._given_up |= dict.fromkeys(numbers, why)
        self._engines.clear()
        del self.choices

    def _choose(self, head: int, sigma: float) -> Choice:
        """The cheapest method for a bandwidth."""
        if self._method != "auto":
            note = "as asked for"
            if self._method == "tiles" and self._sites.dims > _FEW_DIMENSIONS:
                note += f"; in {self._sites.dims} dimensions boxes overlap, and few pairs are left out"
            return Choice(self._method, {self._method: note}, {})
        # Of a cloud on several ranks: the share of one of them, on average, from numbers that all have alike.
        ranks, device = self._sites.ranks, self._sites.device
        N, all_keys = (int(size) for size in ranks.sum(torch.tensor(self._sites.size, device=device)))
        N, M, clouds = max(1, N // ranks.size), all_keys // ranks.size, self._sites.batch.numel()
        pairs = N * all_keys * clouds
        costs = _COSTS.get(device.type, _COSTS["cpu"])
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        threads = -int(ranks.maximum(torch.tensor(-threads, device=device)))
        seconds = {"exact": 1e-9 * costs.pair * pairs / threads}
        if pairs <= _FEW_PAIRS:
            return Choice("exact", {"exact": f"all {pairs:.1e} pairs, too few to think about"}, seconds)
        notes = {"exact": f"all {pairs:.1e} pairs, {_about(seconds['exact'])}"}
        reasons = {name: self._reasons(name) for name in ("fourier", "tiles")}
        if head in self._given_up:
            reasons["fourier"].append(self._given_up[head])

        if not reasons["fourier"]:
            extent = (self._sites.extent / sigma).tolist()
            error = fourier.first_error(self._tol, self._least_sum(sigma), math.sqrt(all_keys))
            shape = fourier.modes(extent, error)
            count, limit = math.prod(shape), fourier.most_modes(N + M)
            if count > limit:
                reasons["fourier"].append(f"{count:.1e} modes, more than {limit:.1e}")
            else:
                taps = costs.tap * max(2, round(-math.log10(10 * error)) + 1) ** len(shape)
                cost = (taps + costs.fourier_point) * 0.5 * (N + M) + costs.mode * count
                cost *= clouds * (1 if error >= fourier.SINGLE else 2)
                seconds["fourier"] = 1e-9 * (cost + costs.call["fourier"]) / threads
                notes["fourier"] = f"{' × '.join(map(str, shape))} modes, {_about(seconds['fourier'])}"

        if not reasons["tiles"]:
            # No cloud in a box has fewer pairs in reach than an even one, which may settle it without sorting.
            reach = math.sqrt(2 * math.log(1 / min(self._tol, 0.5)))
            volume = math.prod(max(1.0, side / sigma / reach) for side in self._sites.extent.tolist())
            least = 1e-9 * costs.pair * pairs / volume / threads
            if self._work.cost("tiles") * least > 2 * min(self._work.cost(name) * t for name, t in seconds.items()):
                notes["tiles"] = f"at least {_about(least)}: too many pairs in reach"
            else:
                tile_pairs, near = self._near(sigma)
                cost = costs.pair * near + costs.tile_pair * tile_pairs + costs.tiled_point * N * clouds
                seconds["tiles"] = 1e-9 * (cost + costs.call["tiles"]) / threads
                notes["tiles"] = f"{near / pairs:.1e} of all pairs, {_about(seconds['tiles'])}"
        notes |= {name: "; ".join(reason) for name, reason in reasons.items() if reason}
        best = min(seconds, key=lambda name: self._work.cost(name) * seconds[name])
        best = METHODS[int(ranks.maximum(torch.tensor(METHODS.index(best), device=device)))]  # though roundings differ
        return Choice(best, {name: notes[name] for name in METHODS}, seconds)

    def _least_sum(self, sigma: float) -> float:
        """The least Σ_j K_ij of a few rows, for equal weights."""
        targets, points, bandwidths = self._sites.flat(torch.tensor(sigma, device=self._sites.device))
        rows, ranks = targets[:, :: max(1, -(-targets.shape[1] // _ROWS))], self._sites.ranks
        found = [rows_attended(ranks, *cloud, None, None).lse for cloud in zip(rows, points, bandwidths, strict=True)]
        return math.exp(-float(ranks.highest(-torch.cat(found))))

    def _near(self, sigma: float) -> tuple[float, ...]:
        """How many pairs of tiles are near, and of points in near parts of them: from a sample, for equal biases.

        On several ranks, of those that one of them has on average. It counts near ones among its own keys, and takes
        as large a part of them to be near those of each other rank: right for a reach far below or above its extent.
        """
        from qattn.attention._near import count_near  # here, because importing Numba takes a while

        dtype = self._sites.clouds[1].dtype
        if 0 in self._sites.size:
            return self._mean(0.0, 0.0)
        self._counted = self._sites.sorted(torch.tensor(sigma))
        targets, points = (cloud.tiling(dtype) for cloud in self._counted)
        bias = torch.zeros(points.clouds, points.size, dtype=dtype)
        scale = scale_of(targets, torch.full((targets.clouds,), sigma))
        limit = cutoff(targets, points, scale, in_base_2(points, bias)[0], self._tol)
        total = targets.clouds * targets.tiles
        sample = torch.linspace(0, total - 1, min(_SAMPLE, total)).round().long()
        tiles, parts = count_near(sample.numpy(), limit, TILE // PART)
        near = parts * PART**2 * total / len(sample)
        others = 1 + (self._sites.ranks.size - 1) * min(1.0, near / math.prod((points.clouds, *self._sites.size)))
        return self._mean(others * tiles * total / len(sample), others * near)

    def _mean(self, *numbers: float) -> tuple[float, ...]:
        """Means of numbers over the ranks."""
        ranks = self._sites.ranks
        sums = ranks.sum(torch.tensor(numbers, dtype=torch.float64, device=self._sites.device))
        return tuple((sums / ranks.size).tolist())


def _made(sites: Sites, backend: str, method: str, sigma: Tensor, instead: Instead | None) -> Engine | None:
    """The engine of a method for some bandwidths, None for "exact"."""
    if method == "exact":
        return None
    return Tiles(*sites.sorted(sigma), backend) if method == "tiles" else Fourier(*sites.flat(sigma), instead)


def _instead_of_fourier(
    methods: "weakref.ref[Methods]", tiles: Callable[[], Engine | None], heads: Tensor | None, error: FourierError
) -> Engine:
    """Tiles, for heads for which FFTs are not exact enough."""
    known = methods()
    if known is not None:
        known._give_up_fourier(heads, str(error))
    engine = tiles()
    assert engine is not None
    return engine


def _about(seconds: float) -> str:
    return f"about {seconds:.2g} s a pass"
