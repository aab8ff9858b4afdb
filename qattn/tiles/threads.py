"""Share work among threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["chunks", "even_chunks", "share"]

_TASKS = 16  # per thread, where their durations differ


def chunks(total: int, size: int) -> list[tuple[int, int]]:
    """Split 0 … total − 1 into ranges (begin, end) of a size."""
    return [(begin, min(begin + size, total)) for begin in range(0, total, size)]


def even_chunks(total: int) -> list[tuple[int, int]]:
    """Split 0 … total − 1 into ranges, several for each thread."""
    return chunks(total, -(-total // (_TASKS * torch.get_num_threads())))


def share(run: Callable[..., object], *rounds: Sequence[tuple[int, ...]]) -> None:
    """Call run(*task) for all tasks on as many threads as torch uses, the calling one among them.

    A round begins when all tasks of the one before are done. The threads live for one call, so it is safe to call it
    from several Python threads and in forked workers. After an error, tasks that have not started are dropped.
    """
    num_threads = min(torch.get_num_threads(), max(map(len, rounds), default=0))
    waiting, lock, has_failed = [iter(tasks) for tasks in rounds], threading.Lock(), threading.Event()
    end_of_round = threading.Barrier(max(1, num_threads))

    def work() -> None:
        for tasks in waiting:
            while True:
                with lock:
                    task = None if has_failed.is_set() else next(tasks, None)
                if task is None:
                    break
                run(*task)
            end_of_round.wait()

    def work_until_error() -> None:
        try:
            work()
        except threading.BrokenBarrierError:  # another thread reports its error
            pass
        except BaseException:  # an interrupt too
            has_failed.set()
            end_of_round.abort()
            raise

    if num_threads <= 1:
        return work()
    with ThreadPoolExecutor(num_threads - 1) as pool:
        others = [pool.submit(work_until_error) for _ in range(num_threads - 1)]
        work_until_error()
        for other in others:
            other.result()
