"""Share work among threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["chunks", "share"]


def chunks(total: int, size: int) -> list[tuple[int, int]]:
    """Split 0 … total − 1 into ranges (begin, end) of a size."""
    return [(begin, min(begin + size, total)) for begin in range(0, total, size)]


def share(run: Callable[..., object], tasks: Sequence[tuple[int, ...]]) -> None:
    """Call run(*task) for all tasks on as many threads as torch uses, the calling one among them.

    The threads live for one call, so it is safe to call it from several Python threads and in forked workers. After an
    error, tasks that have not started are dropped.
    """
    waiting, lock = iter(tasks), threading.Lock()

    def work() -> None:
        try:
            while True:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    return
                run(*task)
        except BaseException:  # an interrupt too
            with lock:
                for _ in waiting:
                    pass
            raise

    num_helpers = min(torch.get_num_threads(), len(tasks)) - 1
    if num_helpers <= 0:
        return work()
    with ThreadPoolExecutor(num_helpers) as pool:
        others = [pool.submit(work) for _ in range(num_helpers)]
        work()
        for other in others:
            other.result()
