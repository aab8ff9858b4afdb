"""Functions that `torch.compile` calls instead of tracing them, and that compute in the dtypes they are given."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from qattn._autocast import without_autocast

__all__ = ["eager"]

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` from tracing a function, and autocast from rounding in it.

    Such functions have data-dependent iterations or compiled loops. `torch.compiler.disable` is slow to import, and
    therefore only used once Dynamo is loaded.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules and not disabled:
            disabled.append(torch.compiler.disable(function))
        with without_autocast():
            return (disabled[0] if disabled else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
