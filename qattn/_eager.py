"""Functions that `torch.compile` calls instead of tracing them, and that compute in the dtypes they are given."""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

__all__ = ["eager", "without_autocast"]

P = ParamSpec("P")
T = TypeVar("T")
_DEVICES = "cpu", "cuda", "xpu", "mps"


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Switch autocast off within a function, whose sums and products need the dtypes of their inputs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in _DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` from tracing a function, and autocast from rounding in it.

    Such functions have data-dependent iterations or compiled loops. Equivalent to `torch.compiler.disable`, which is
    slow to import and therefore only used once Dynamo is loaded, and `without_autocast`.
    """
    exact = without_autocast(function)
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return exact(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(exact))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
