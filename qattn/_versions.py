"""The version of qattn, differences between versions of torch, and libraries that are missing or do not import."""

import functools
import importlib

import torch

__all__ = ["__version__", "is_exporting", "why_no_flex", "why_not_importable", "why_old_triton"]

__version__ = "0.2.0"

_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
# First version of torch whose FlexAttention serves, by device: on CUDA the one that returns an lse by `AuxRequest`, and
# takes lists of blocks as they are; on a CPU the one whose kernel was tested.
_FLEX = {"cpu": (2, 13), "cuda": (2, 9)}
_TRITON = (3, 5)  # earlier ones do not multiply by blocks of eight channels, and 3.2 has no tuples


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing, for functions that `torch.compile` does not trace.

    Only export traces such functions, so that `is_compiling` answers the question in torch 2.6, which has no
    `is_exporting`.
    """
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling()


def why_no_flex(device: str) -> str | None:
    """Return the reason why FlexAttention cannot be used on "cpu" or "cuda" with this version of torch, or None."""
    least = _FLEX[device]
    if least <= _TORCH:
        return None
    return f"needs torch {least[0]}.{least[1]} on {device}, and this is {torch.__version__}"


def why_old_triton(version: str) -> str | None:
    """Return the reason why a version of Triton cannot be used, or None.

    Examples:
        >>> why_old_triton("3.4.0")
        'needs triton 3.5, which torch 2.9 brings along, and this is 3.4.0'
    """
    if tuple(int(number) for number in version.split(".")[:2]) >= _TRITON:
        return None
    return "needs triton {}.{}, which torch 2.9 brings along, and this is {}".format(*_TRITON, version)


@functools.cache
def why_not_importable(library: str) -> str | None:
    """Import a library, and return the reason if that fails: it is not installed, or broken; otherwise None.

    Examples:
        >>> why_not_importable("a_missing_library")
        'a_missing_library is not installed: `pip install a_missing_library`'
    """
    try:
        importlib.import_module(library)
    except Exception as error:  # a broken library raises anything
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            return f"{library} is not installed: `pip install {library}`"
        first_line = str(error).split("\n", 1)[0]
        return f"{library} is installed, but does not import ({type(error).__name__}: {first_line})"
    return None
