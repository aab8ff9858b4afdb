"""Compiled functions, and the threads that share their work."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

__all__ = ["compiled", "share"]

Task = TypeVar("Task")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by Numba on its first call, without Python's lock, and kept on disk where that is allowed.

    Numba finds a stale file by the date of the function's own source alone: what it calls from other files should be
    in its closure, by a checksum.
    """
    from numba import njit  # here, because importing it takes a while

    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep it: every process compiles its own
        return njit(nogil=True, error_model="numpy")(function)


def share(run: Callable[[Task], object], tasks: Iterable[Task], count: int) -> None:
    """Runs `count` tasks on as many threads as torch would use, this one among them; an error drops those not begun.

    The threads live for one call only, so that it is safe in several Python threads at once and in forked workers.
    """
    waiting, lock = iter(tasks), threading.Lock()

    def work() -> None:
        try:
            while True:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    return
                run(task)
        except BaseException:  # an interrupt too
            with lock:
                for _ in waiting:
                    pass
            raise

    helpers = min(torch.get_num_threads(), count) - 1
    if helpers <= 0:
        return work()
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(work) for _ in range(helpers)]
        work()
        for other in others:
            other.result()
