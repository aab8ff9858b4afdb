"""Small HTML tables for notebooks, with every text escaped."""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table"]


def table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table with a title above it; the lines of a cell stay lines."""
    heads = [_row("th", header)] if header else []
    body = "".join([*heads, *(_row("td", row) for row in rows)])
    return f"<div><strong>{escape(title)}</strong><table>{body}</table></div>"


def _row(tag: str, cells: Sequence[object]) -> str:
    texts = (escape(str(cell)).replace("\n", "<br>") for cell in cells)
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{text}</{tag}>' for text in texts) + "</tr>"
