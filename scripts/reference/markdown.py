"""Pieces of Markdown that cannot break the table or the page that they stand in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 110

_SPECIAL = re.compile(r"([\\`*_\[\]|])")


def plain(text: str) -> str:
    """Return ``text`` on one line, so that it is shown as it is. Code between backticks stays code."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()).replace("``", "`"))
    return "".join(code(piece[1:-1]) if at % 2 else _escaped(piece) for at, piece in enumerate(pieces))


def prose(text: str) -> str:
    """Return paragraphs of ``text``, which blank lines divide, in lines that fit a terminal."""
    paragraphs = (plain(paragraph) for paragraph in re.split(r"\n\s*\n", text.strip()))
    return "\n\n".join(
        textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False) for each in paragraphs
    )


def code(text: str) -> str:
    """Return ``text`` as code; empty text is none."""
    return f"`{text}`".replace("|", r"\|") if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown; no rows: no table."""
    lines = [_row(row) for row in rows]
    return "\n".join([_row(head), "|---" * len(head) + "|", *lines]) + "\n" if lines else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace("<", "&lt;")
