"""How the command speaks: numbers with their nouns, and what is wrong in one sentence, to stderr."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["counted", "one_sentence"]


def counted(number: int, noun: str) -> str:
    """A number of things: "1 thread", "2,000 points"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@contextmanager
def one_sentence() -> Iterator[None]:
    """What is wrong with the input is said in a sentence, with exit code 2; warnings take one each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning)  # ours; others are for programmers
        warnings.showwarning = lambda message, *_, **__: _say(f"Warning: {message}")
        try:
            yield
        except OSError as error:
            _say(f"{error.filename}: {error.strerror}." if error.filename else str(error))
            raise typer.Exit(2) from None
        except (ValueError, ModuleNotFoundError) as error:
            _say(str(error))
            raise typer.Exit(2) from None


def _say(text: str) -> None:
    typer.echo(" ".join(text.split()), err=True)
