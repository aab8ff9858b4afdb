"""A progress bar for long computations, on terminals and for those who watch."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

__all__ = ["Progress", "watched"]

Watcher = Callable[[int, int | None], None]  # of the number of passes so far, and of that of all, if it is known

_PATIENCE = 2.0  # seconds
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell each pass of what this thread computes within the block.

    Examples:
        >>> with watched(print), Progress("Flow", total=2) as progress:
        ...     progress.advance()
        1 2
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Progress:
    """Count passes, and show a bar once they have taken two seconds, if stderr is a terminal.

    With several ranks, only the first shows a bar.

    Examples:
        >>> with Progress("Sinkhorn") as progress:
        ...     progress.advance(error=np.array(1e-3))
    """

    def __init__(self, name: str, total: int | None = None) -> None:
        self._name, self._total = name, total
        self._start, self._count = time.monotonic(), 0
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def advance(self, **figures: Tensor | np.ndarray) -> None:
        """Count one pass, and show the largest number of each tensor or array."""
        self._count += 1
        if (watcher := _watcher.get()) is not None:
            watcher(self._count, self._total)
        if self._bar is None:
            is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
            if time.monotonic() - self._start < _PATIENCE or not sys.stderr.isatty() or not is_first:
                return
            from tqdm import tqdm  # here, because it is rarely needed

            self._bar = tqdm(desc=self._name, total=self._total, unit=" passes", leave=False, mininterval=0)
            self._bar.update(self._count - 1)
        self._bar.set_postfix({name: f"{float(x.max()):.1e}" for name, x in figures.items()}, refresh=False)
        self._bar.update()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
