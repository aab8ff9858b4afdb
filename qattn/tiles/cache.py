"""Machine code on disk, and a record of the loops that are compiled.

If a file is missing or damaged, its code is compiled again; if it cannot be written, the code is not kept. Folders that
other users can write to are not used.
"""

import functools
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Files", "cache_folder", "is_compiled", "remember", "stamp"]

_SUM = 32  # bytes of a checksum
_remembered: set[str] = set()


def is_compiled(task: str) -> bool:
    """Return whether all loops of a task are compiled, in this process or on disk, according to `remember`."""
    return task in _remembered or ((path := _memo(task)) is not None and path.exists())


def remember(task: str) -> None:
    """Note that all loops of a task are compiled."""
    if task in _remembered:
        return
    _remembered.add(task)
    if (path := _memo(task)) is not None:
        with suppress(OSError):
            path.touch()
        _remove_others(path.parent, _tasks(), _digest(stamp()))


def _memo(task: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{_tasks()}.{_digest(stamp())}.{task}"


@functools.cache
def _tasks() -> str:
    """Return the name of notes of this Python on this processor, for which code is compiled. Others may share a home.

    Code itself is kept by Numba's key, which has the processor.
    """
    from llvmlite.binding import get_host_cpu_name  # here, because Numba may be missing

    return f"tasks.{sys.implementation.cache_tag}.{get_host_cpu_name()}"


@functools.cache
def cache_folder() -> Path | None:
    """Find a folder for machine code that can be written to; None if there is none.

    They are, in this order: NUMBA_CACHE_DIR, the `__pycache__` of the loops, the cache of the user, and a folder of the
    user among temporary ones.
    """
    for folder, is_shared in _folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # What is read from it is run, so that no one else may write there.
            if is_shared and hasattr(os, "getuid"):
                found = folder.stat()
                if found.st_uid != os.getuid() or found.st_mode & 0o022:
                    continue
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


def _folders() -> Iterator[tuple[Path, bool]]:
    """Yield folders to try, and whether each lies in a folder that all users share."""
    loops = Path(__file__).parent / "loops"
    name = f"qattn-{_digest(str(loops))}"  # installations do not share a folder
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen) / name, False
    yield loops / "__pycache__", False
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / name, False
    with suppress(FileNotFoundError):  # no temporary folder can be written to
        yield Path(tempfile.gettempdir()) / f"{name}-{os.getuid() if hasattr(os, 'getuid') else ''}", True


@functools.cache
def _announce() -> None:
    """Say once that compiling takes a while, if there is a terminal."""
    if sys.stderr.isatty():
        print("qattn compiles loops for this machine, once. `qattn warm` compiles all of them.", file=sys.stderr)


def stamp() -> tuple[str, str]:
    """Return the version of Numba and the checksum of the sources, on which machine code depends."""
    return sys.modules["numba"].__version__, _checksum()


@functools.cache
def _checksum() -> str:
    """Compute a checksum of all sources of code and constants of compiled functions."""
    folder = Path(__file__).parent
    sources = sorted([folder / "sizes.py", *(folder / "loops").glob("*.py")])
    return _digest([source.read_bytes() for source in sources])


class Files:
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
        self._folder, self._name, self._stamp = folder, name, _digest(stamp)

    def _path(self, key: object) -> Path:
        return self._folder / f"{self._name}.{self._stamp}.{_digest(key)}.nbc"

    def load(self, key: object) -> object:
        """Return the data saved under a key, or None if there are none, or if they are damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content[_SUM:]).digest() == content[:_SUM]:
            with suppress(Exception):  # whole, but not of these versions: what it names may be missing, or fail
                return pickle.loads(content[_SUM:])
        _announce()  # Numba compiles what is not found
        return None

    def save(self, key: object, data: object) -> None:
        """Write the data from which Numba restores a function, with their checksum; nothing if that fails."""
        from numba.core.serialize import dumps

        content = dumps(data)
        with suppress(OSError):  # the disk may be full
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(hashlib.sha256(content).digest() + content)
                    file.flush()
                except OSError:
                    os.unlink(file.name)
                    raise
            os.replace(file.name, self._path(key))
            _remove_others(self._folder, self._name, self._stamp)


def _remove_others(folder: Path, name: str, stamp: str) -> None:
    """Remove the files of a name with another stamp."""
    for other in folder.glob(f"{name}.*"):
        if not other.name.startswith(f"{name}.{stamp}."):
            with suppress(OSError):  # it may be deleted already, or in use
                other.unlink()


def _digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]
