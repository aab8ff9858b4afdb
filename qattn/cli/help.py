"""Commands whose help shows flags without a type, because `--version <bool>` reads as if it took a value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group"]


class _PlainFlags:
    """What commands and groups of commands have in common."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command with plain flags."""


class Group(_PlainFlags, TyperGroup):
    """The command that has the others, with plain flags."""
