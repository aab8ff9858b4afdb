"""Compile functions with Numba, and cache their machine code on disk."""

import functools
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["compiled", "why_not_compiled"]


def why_not_compiled() -> str | None:
    """Return the reason why Numba does not compile, or None. Loops over registers cannot run uncompiled."""
    numba = sys.modules.get("numba")  # not imported here, because that takes a while
    is_off = numba.config.DISABLE_JIT if numba else os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return "Numba's compiler is turned off, by NUMBA_DISABLE_JIT" if is_off else None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, to run without Python's lock; cache the code on disk if possible.

    If Numba's compiler is turned off, return the function itself.
    """
    from numba import njit  # here, because importing it takes a while

    if why_not_compiled():
        return function
    try:
        dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder to write to, so every process compiles for itself
        return njit(nogil=True, error_model="numpy")(function)
    index = dispatcher._cache._cache_file
    stamp = index._version, _checksum()
    dispatcher._cache._cache_file = _Files(
        Path(dispatcher._cache.cache_path), index._index_name.removesuffix(".nbi"), stamp
    )
    return dispatcher


@functools.cache
def _checksum() -> str:
    """Compute a checksum of all sources of code and constants of compiled functions."""
    folder = Path(__file__).parent
    sources = sorted([folder / "sizes.py", *(folder / "loops").glob("*.py")])
    return _digest([source.read_bytes() for source in sources])


class _Files:
    """Machine code on disk: one file per signature of a function, named after everything it depends on.

    Numba itself numbers its files and keeps an index. If several processes compile at once, one of them might then load
    code that another has compiled for other types or from an older source. With these names that cannot happen, and
    files are written atomically.

    Args:
        folder: Folder of the files.
        name: Prefix of their names.
        stamp: Version of Numba and of the sources. Files with another stamp are removed.
    """

    def __init__(self, folder: Path, name: str, stamp: object) -> None:
        self._folder, self._name, self._prefix = folder, name, f"{name}.{_digest(stamp)}."

    def _path(self, key: object) -> Path:
        return self._folder / f"{self._prefix}{_digest(key)}.nbc"

    def load(self, key: object) -> object:
        """Return the data saved under a key, or None."""
        try:
            return pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, key: object, data: object) -> None:
        """Write the data from which Numba restores a function."""
        from numba.core.serialize import dumps

        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(dumps(data))
        os.replace(file.name, self._path(key))
        for other in self._folder.glob(f"{self._name}.*"):
            if not other.name.startswith(self._prefix):
                with suppress(OSError):  # it may be deleted already, or in use
                    other.unlink()


def _digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]
