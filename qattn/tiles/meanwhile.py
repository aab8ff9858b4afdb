"""The time until loops are compiled, in which torch computes: as long as the compiler would take, and no longer.

On a new machine a few clouds are done before a compiler would be. However many there will be, the total is at most
twice as long as if that were known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from qattn.tiles.cache import is_compiled, remember
from qattn.tiles.compiled import why_not_compiled

__all__ = ["Loop", "at_once", "is_due", "seconds_to_compile"]

patience = 1.0  # seconds that torch may take, per second that the compiler would
# Seconds of the compiler on one core, about (benchmarks/cold_start.py).
_COMPILER = {
    "layout": 0.5, "sort": 3.0, "attend": 6.0, "attend near": 10.0, "differentiate": 4.0, "differentiate near": 6.0,
}  # fmt: skip
_spent: dict["Loop", float] = {}  # seconds that torch has computed in place of loops


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


def seconds_to_compile(loop: Loop) -> float:
    """Estimate how long a loop is compiled before it first runs; 0 if it is compiled already, inf if it cannot be."""
    if why_not_compiled():
        return torch.inf
    return 0.0 if loop.is_compiled else patience * _COMPILER[loop.name]


def is_due(loop: Loop, seconds: float) -> bool:
    """Return whether to call a loop: it is compiled, or torch would have computed in its place for too long.

    Args:
        loop: The loop.
        seconds: Estimate of how long torch takes for this call. If the loop is not due, they count as spent.
    """
    most = seconds_to_compile(loop)
    spent = _spent.get(loop, 0.0) + seconds
    if most == 0.0 or spent > most:
        return True
    _spent[loop] = spent
    return False


@contextmanager
def at_once() -> Iterator[None]:
    """Let loops be compiled when they are first called."""
    global patience
    before, patience = patience, 0.0
    try:
        yield
    finally:
        patience = before
