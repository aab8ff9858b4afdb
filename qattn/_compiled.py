"""Compiled functions, the files that keep them, and the threads that share their work."""

import hashlib
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["compiled", "share", "why_not_compiled"]

Task = TypeVar("Task")


def why_not_compiled() -> str | None:
    """Why functions are not compiled, if they are not: then those that are written in registers cannot run at all."""
    numba = sys.modules.get("numba")  # importing it takes a while
    is_off = numba.config.DISABLE_JIT if numba else os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return "Numba's compiler is turned off, by NUMBA_DISABLE_JIT" if is_off else None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by Numba on its first call, without Python's lock, and kept on disk where that is allowed.

    Numba finds a stale file by the date of the function's own source alone: what it calls from other files should be
    in its closure, by a checksum. Where Numba's compiler is turned off, it is the function itself.
    """
    from numba import njit  # here, because importing it takes a while

    if why_not_compiled():
        return function

    try:
        kept = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep it: every process compiles its own
        return njit(nogil=True, error_model="numpy")(function)
    numbas = kept._cache._cache_file
    stamp = numbas._version, numbas._source_stamp
    kept._cache._cache_file = _Files(Path(kept._cache.cache_path), numbas._index_name.removesuffix(".nbi"), stamp)
    return kept


class _Files:
    """Machine code on disk, in a file for each signature of a function, named after all that it depends on.

    Numba numbers its files and keeps an index of them, so that of processes which compile at once one can load what
    another has compiled for other types, or what an older source has left. Here nothing is found that was not looked
    for, and a file is there as a whole or not at all.

    Args:
        folder: Where the files are.
        name: With what their names begin.
        stamp: Which Numba and which source; files of others are removed.
    """

    def __init__(self, folder: Path, name: str, stamp: object) -> None:
        self._folder, self._name, self._fresh = folder, name, f"{name}.{_digest(stamp)}."

    def _path(self, key: object) -> Path:
        return self._folder / f"{self._fresh}{_digest(key)}.nbc"

    def load(self, key: object) -> object:
        """What was saved under a key: a signature and a processor; None if nothing was."""
        try:
            return pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, key: object, data: object) -> None:
        """Keeps data, of which Numba makes a function again."""
        from numba.core.serialize import dumps

        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(dumps(data))
        os.replace(file.name, self._path(key))
        for other in self._folder.glob(f"{self._name}.*"):
            if not other.name.startswith(self._fresh):
                with suppress(OSError):  # it may be gone already, or in use
                    other.unlink()


def _digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]


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
