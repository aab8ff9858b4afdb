"""A thread that computes the latest of many requests."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Worker"]

Request = TypeVar("Request")
Result = TypeVar("Result")


class Worker(Generic[Request, Result]):
    """Compute requests one at a time in a thread; one that waits is dropped for a newer one.

    Args:
        compute: Function of a request.
        show: Called with each result.
        fail: Called with the message of each exception, after which the worker goes on.

    Examples:
        >>> worker = Worker(lambda number: 1 / number, print, print)
        >>> worker.request(4)
        >>> worker.wait()
        0.25
        >>> worker.request(0)
        >>> worker.wait()
        division by zero
        >>> worker.close()
    """

    def __init__(
        self, compute: Callable[[Request], Result], show: Callable[[Result], None], fail: Callable[[str], None]
    ) -> None:
        self._compute, self._show, self._fail = compute, show, fail
        self._pending: list[Request] = []  # at most one
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="qattn viewer", daemon=True)
        self._thread.start()

    def request(self, request: Request) -> None:
        """Compute a request next, in place of one that waits."""
        with self._changed:
            self._pending = [request]
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until nothing is left to compute."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not (self._pending or self._is_busy))

    def close(self) -> None:
        """Drop what waits, and end the thread after its current computation, whose result is not shown."""
        with self._changed:
            self._is_closed, self._pending = True, []
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._pending))
                if self._is_closed:
                    return
                request, self._is_busy = self._pending.pop(), True
            try:
                result = self._compute(request)
                if not self._is_closed:
                    self._show(result)
            except Exception as error:  # any, because the page should outlive it
                if not self._is_closed:
                    self._fail(str(error) or type(error).__name__)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()
