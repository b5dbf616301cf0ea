"""The navigation of the site, which is that of docs/README.md: its headings, and its tables' first links."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from scripts.site.pages import INDEX, ROOT, place_of

Section = Mapping[str, list["str | Section"]]
"""A heading with the pages below it, and sections inside of it."""

_ROW = re.compile(r"\| \[[^\]]+\]\(([^)]+)\)")
_HEADING = re.compile(r"(##+) (.+)")


def navigation() -> list[str | Section]:
    """Return mkdocs' ``nav``: the README first, then a section for each heading of the index."""
    entries: list[str | Section] = [place_of(ROOT / "README.md").as_posix()]
    open_sections: list[list[str | Section]] = [entries]
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        if heading := _HEADING.fullmatch(line):
            pages: list[str | Section] = []
            del open_sections[len(heading[1]) - 1 :]
            open_sections[-1].append({heading[2]: pages})
            open_sections.append(pages)
        elif row := _ROW.match(line):
            file = Path(os.path.normpath(INDEX.parent / row[1]))
            open_sections[-1].append(place_of(file).as_posix())
    entries.append(place_of(INDEX).as_posix())
    return entries
