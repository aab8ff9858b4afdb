"""Behavior that all commands share: plain flags in the help, and messages of one line."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group", "counted"]


class _PlainFlags:
    """Help that shows flags without a type: `--version <bool>` reads as if it took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command that reports wrong input in one line, with exit code 2, and each warning in one line."""

    def invoke(self, ctx: Any) -> Any:
        with _messages_of_one_line():
            return super().invoke(ctx)


class Group(_PlainFlags, TyperGroup):
    """The group of all commands."""


def counted(number: int, noun: str) -> str:
    """Format a number of things: "1 thread", "2,000 points"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@contextmanager
def _messages_of_one_line() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning)  # other categories are for programmers
        warnings.showwarning = lambda message, *_, **__: _print_line(f"Warning: {message}")
        try:
            yield
        except BrokenPipeError:  # as by `| head`: Click ends without a word
            raise
        except OSError as error:
            _print_line(f"{error.filename}: {error.strerror}." if error.filename else str(error))
            raise typer.Exit(2) from None
        except (ValueError, ModuleNotFoundError) as error:
            _print_line(str(error))
            raise typer.Exit(2) from None


def _print_line(text: str) -> None:
    typer.echo(" ".join(text.split()), err=True)
