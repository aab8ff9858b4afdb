"""Functions that `torch.compile` calls instead of tracing them."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["eager"]

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` from tracing a function, such as a data-dependent iteration or a compiled loop.

    Equivalent to `torch.compiler.disable`, which is slow to import and therefore only used once Dynamo is loaded.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
