"""What commands show with `rich`, for a person at a terminal and for a file alike."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 110
"""Columns where the output is no terminal."""


def show(shown: RenderableType, console: Console) -> None:
    """Print to the terminal; elsewhere without colours, in `WIDTH` columns, and no line with spaces at its
    end."""
    if console.is_terminal:
        console.print(shown)
        return
    plain = Console(highlight=False, width=WIDTH, file=StringIO())
    with plain.capture() as lines:
        plain.print(shown)
    print("\n".join(line.rstrip() for line in lines.get().splitlines()))
