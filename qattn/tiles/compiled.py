"""Compile functions with Numba."""

import sys
from collections.abc import Callable
from typing import Any

from qattn._versions import why_not_importable
from qattn.tiles.cache import Files, cache_folder, stamp

__all__ = ["compiled", "why_not_compiled"]


def why_not_compiled() -> str | None:
    """Return the reason why Numba does not compile, or None. Loops over registers cannot run uncompiled."""
    if reason := why_not_importable("numba"):
        return reason
    is_off = sys.modules["numba"].config.DISABLE_JIT
    return "Numba's compiler is turned off, by NUMBA_DISABLE_JIT" if is_off else None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, to run without Python's lock; cache the code on disk if possible.

    If Numba's compiler is turned off, return the function itself.
    """
    if why_not_compiled():
        return function
    from numba import config, njit

    folder = cache_folder()
    if folder is None:
        return njit(nogil=True, error_model="numpy")(function)
    make = njit(nogil=True, cache=True, error_model="numpy")
    try:
        dispatcher = make(function)
    except RuntimeError:  # Numba itself knows of no folder to write to
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            dispatcher = make(function)
        finally:
            config.CACHE_DIR = before
    name = dispatcher._cache._cache_file._index_name.removesuffix(".nbi")
    dispatcher._cache._cache_file = Files(folder, name, stamp())
    return dispatcher
