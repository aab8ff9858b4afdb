"""Which files are read at all, and how much memory their content may take.

A few megabytes of compressed zeros are gigabytes of voxels, and a device has no end. Every reader therefore compares
what a header declares with a limit before it decompresses or allocates.
"""

import os
import stat
from pathlib import Path

__all__ = ["LIMIT", "RefusedError", "regular_bytes", "within"]

LIMIT = 4 * 2**30

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class RefusedError(ValueError):
    """A file that is whole but cannot be used; the message is for the user and starts in lower case."""


def within(limit: int, size: int) -> None:
    """Refuses content that takes more than `limit` bytes in memory."""
    if size > limit:
        raise RefusedError(
            f"its content takes more than the limit of {limit / 2**30:.3g} GiB. "
            "If that is what you expect, read it in Python and give `qattn.io.read` a larger `limit`."
        )


def regular_bytes(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most `limit` bytes; devices and pipes, which may have no end, are refused."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
        raise RefusedError(f"it is {kind}, and only regular files are read. Copy its content into a file first.")
    within(limit, status.st_size)
    with open(path, "rb") as file:
        return file.read(status.st_size)
