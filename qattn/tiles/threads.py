"""Share work among the threads of torch.

Torch's OpenMP threads spin for some milliseconds after each operation, to be ready for the next. Threads of our own
would compete with them for the cores, and lose a quarter of the time of small clouds.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

__all__ = ["chunks", "even_chunks", "share"]

_TASKS = 16  # per thread, where their durations differ
_PROCESS = os.getpid()
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def chunks(total: int, size: int) -> list[tuple[int, int]]:
    """Split 0 … total − 1 into ranges (begin, end) of a size."""
    return [(begin, min(begin + size, total)) for begin in range(0, total, size)]


def even_chunks(total: int) -> list[tuple[int, int]]:
    """Split 0 … total − 1 into ranges, several for each thread."""
    return chunks(total, -(-total // (_TASKS * torch.get_num_threads())))


def share(run: Callable[..., object], *rounds: Sequence[tuple[int, ...]]) -> None:
    """Call run(*task) for all tasks on as many threads as torch uses, the calling one among them.

    A round begins when all tasks of the one before are done. It is safe to call it from several Python threads and in
    forked workers. After an error, tasks that have not started are dropped.
    """
    waiting: Iterator[tuple[int, ...]] = iter(())
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            while not errors:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    break
                run(*task)
        except BaseException as error:  # an interrupt too
            errors.append(error)

    body = _Body(work)
    for tasks in rounds:
        waiting = iter(tasks)
        num_threads = min(torch.get_num_threads(), len(tasks))
        if num_threads <= 1:
            work()
        elif (parallel := _openmp()) is not None and os.getpid() == _PROCESS:  # OpenMP does not survive a fork
            parallel(body, None, num_threads, 0)
        else:
            with ThreadPoolExecutor(num_threads - 1) as pool:
                for _ in range(num_threads - 1):
                    pool.submit(work)
                work()
        if errors:
            raise errors[0]


@cache
def _openmp() -> Callable[..., object] | None:
    """Return `GOMP_parallel` of the OpenMP that torch uses, under its GNU or LLVM name; None where it has no such."""
    try:
        parallel: Any = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes, parallel.restype = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel
