"""Errors and warnings of the readers, and the limit on memory.

A few megabytes of compressed zeros expand to gigabytes of voxels. Every reader therefore compares the size that a
header declares with the limit before it decompresses or allocates.
"""

__all__ = ["PartlyReadWarning", "RefusedError", "check_size"]


class PartlyReadWarning(UserWarning):
    """Part of a file was left out."""


class RefusedError(ValueError):
    """An intact file that cannot be used; the message completes "<path> cannot be used: "."""


def check_size(num_bytes: int, limit: int) -> None:
    """Refuse content that needs more than `limit` bytes of memory."""
    if num_bytes > limit:
        raise RefusedError(
            f"its content needs more memory than the limit of {limit / 2**30:.3g} GiB. "
            "To read it anyway, call `qattn.io.read` with a larger `limit`."
        )
