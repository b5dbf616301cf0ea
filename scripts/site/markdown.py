"""GitHub's Markdown in the spelling of Python-Markdown, which mkdocs reads.

Pages are written as GitHub shows them. Python-Markdown wants what is inside of a list item indented by four
columns a level, a blank line before a list or table that follows a paragraph, and plain pipes in code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

INDENT = 4

_MARKER = re.compile(r" *([-*+]|\d+[.)]) +(?=\S)")
_FENCE = re.compile(r" *(```+|~~~+)")
_CODE = re.compile(r"`[^`]+`")


def to_python_markdown(text: str) -> str:
    """Return ``text`` so that Python-Markdown makes of it what GitHub does."""
    return "\n".join(_Respelling().lines(text.splitlines())) + "\n"


class _Respelling:
    """One pass over the lines of a page."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        """The column in which the content of each open list item begins, outermost first."""
        self._fence = ""
        """The end of the open block of code; empty: none is open."""
        self._before = ""
        """The line before, without its indentation."""

    def lines(self, source: list[str]) -> Iterator[str]:
        for line in source:
            yield from self._line(line)
            self._before = line.strip()

    def _line(self, line: str) -> Iterator[str]:
        if self._fence or not line.strip():
            if self._fence and line.strip().startswith(self._fence):
                self._fence = ""
            yield self._inside(line)
            return
        fence, marker, in_list = _FENCE.match(line), _MARKER.match(line), bool(self._offsets)
        if marker and marker[1][:-1] not in ("", "1") and self._before and not in_list:
            marker = None  # a paragraph's line that happens to begin with a number
        table = line.lstrip().startswith("|")
        self._leave_items(line, goes_on=not (fence or marker or table or self._before.startswith("|")))
        if marker:
            if self._before and not in_list:
                yield ""
            yield " " * INDENT * len(self._offsets) + f"{marker[1]} {line[marker.end() :]}"
            self._offsets.append(marker.end())
            return
        if fence:
            self._fence = fence[1]
        elif table:
            if self._before and not self._before.startswith("|"):
                yield ""
            line = _CODE.sub(lambda code: code[0].replace(r"\|", "|"), line)
        yield self._inside(line)

    def _leave_items(self, line: str, *, goes_on: bool) -> None:
        """Close the list items that ``line`` is not inside of. One that ``goes_on`` with a paragraph need not
        be indented."""
        if goes_on and self._before:
            return
        indent = len(line) - len(line.lstrip(" "))
        while self._offsets and indent < self._offsets[-1]:
            self._offsets.pop()

    def _inside(self, line: str) -> str:
        if not line.strip() or not self._offsets:
            return line
        indent = len(line) - len(line.lstrip(" "))
        return " " * INDENT * len(self._offsets) + line[min(indent, self._offsets[-1]) :]
