"""Decide when to compile a loop: once torch has spent as long as compiling would take.

On a new machine, torch finishes a few clouds before a compiler would. However many follow, the total time is at most
twice the best possible, in which that number is known in advance. If another method is used because a loop is not
compiled, the time that it takes longer counts as well, so that every machine compiles its loops at some point.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import torch

from qattn.tiles.cache import is_compiled, remember
from qattn.tiles.compiled import why_not_compiled

__all__ = ["Loop", "charge", "compile_at_first_call", "is_due", "seconds_until_due"]

# Seconds of the compiler on one core, about (benchmarks/cold_start.py), which are as many as torch may take.
_COMPILER = {
    "layout": 0.5, "sort": 3.0, "attend": 6.0, "attend near": 10.0, "differentiate": 4.0, "differentiate near": 6.0,
    "mixture": 7.0,
}  # fmt: skip
_MOST_DIMS = 5  # stands for all larger dimensions of a `Loop`
# Seconds that torch has spent in place of loops. They are counted per process, as the compiled loops are: compiling
# pays because of many clouds, each in a kernel of its own.
_spent: dict["Loop", float] = {}


class Loop(NamedTuple):
    """Loops that are compiled together, for each dtype and dimension."""

    name: str
    dtype: torch.dtype
    dims: int = 0

    @property
    def _task(self) -> str:
        return f"{self.name}-{self.dtype}-{self.dims}".replace(" ", "-")

    @property
    def is_compiled(self) -> bool:
        return is_compiled(self._task)

    def remember(self) -> None:
        """Note that it is compiled, on disk too."""
        remember(self._task)


def seconds_until_due(loop: Loop) -> float:
    """Return how long torch may still compute in place of a loop; 0 if it is compiled, inf if it cannot be compiled."""
    if why_not_compiled():
        return torch.inf
    return 0.0 if loop.is_compiled else max(0.0, _COMPILER[loop.name] - _spent.get(loop, 0.0))


def is_due(loop: Loop, seconds: float) -> bool:
    """Return whether to call a loop, as torch would exceed its time; `charge` the seconds if torch computes instead.

    Args:
        loop: The loop.
        seconds: Estimate of how long torch takes for this call.
    """
    left = seconds_until_due(loop)
    return left == 0.0 or seconds > left


def charge(loop: Loop, seconds: float) -> None:
    """Count seconds that are spent because a loop is not compiled."""
    _spent[loop] = _spent.get(loop, 0.0) + seconds


@contextmanager
def compile_at_first_call() -> Iterator[None]:
    """Make all loops due within the context: for `qattn warm`, and for tests and benchmarks of the loops."""
    spent = dict(_spent)
    kinds = product(_COMPILER, (torch.float32, torch.float64), range(_MOST_DIMS + 1))
    _spent.update((Loop(*kind), torch.inf) for kind in kinds)
    try:
        yield
    finally:
        _spent.clear()
        _spent.update(spent)
