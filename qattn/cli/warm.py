"""The command `qattn warm`."""

import time

import typer
from rich.console import Console
from rich.progress import track

from qattn.cli.command import counted
from qattn.tiles.cache import cache_folder
from qattn.tiles.compiled import why_not_compiled
from qattn.warm import tasks

__all__ = ["warm"]


def warm() -> None:
    """Compile all loops for this machine, which takes a few minutes, so that no later call waits for a compiler.

    Otherwise they are compiled when they are first needed, for some seconds each.
    """
    if reason := why_not_compiled():
        raise ValueError(f"Nothing can be compiled: {reason}.")
    folder = cache_folder()
    if folder is None:
        raise ValueError("No folder can be written to. Set NUMBA_CACHE_DIR to one that can.")
    start = time.perf_counter()
    todo = list(tasks())
    for _, compile_loops in track(todo, "compiling", console=Console(stderr=True), transient=True):
        compile_loops()
    typer.echo(f"{counted(len(todo), 'task')} compiled in {time.perf_counter() - start:.0f} s, kept in {folder}")
