"""The pages of the site: which files of the repository they are, where they lie, and what they link to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from scripts.site.markdown import to_python_markdown

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs/README.md"
PLACES: Mapping[Path, str] = {
    ROOT / "README.md": "index.md",
    INDEX: "pages.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
}
"""The pages that lie elsewhere in the site than below docs."""

FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s]+)", re.MULTILINE)


class MissingTargetError(Exception):
    """A page links to something that the repository does not have. Its text names both."""


def place_of(file: Path) -> PurePosixPath:
    """Return where a file of the repository lies in the site: a page, a picture, or a file that is linked."""
    if file in PLACES:
        return PurePosixPath(PLACES[file])
    if file.is_relative_to(ROOT / "docs"):
        return PurePosixPath(file.relative_to(ROOT / "docs").as_posix())
    return PurePosixPath("repository", file.relative_to(ROOT).as_posix())


def lay_out(directory: Path) -> None:
    """Write all pages, and what they link to, into the empty ``directory``.

    Raises:
        MissingTargetError: a page links to a file that is not there.
    """
    documents = (file for file in (ROOT / "docs").rglob("*") if file.is_file())
    wanted = [*PLACES, *sorted(documents)]
    done: set[Path] = set()
    while wanted:
        file = wanted.pop()
        if file in done:
            continue
        done.add(file)
        target = directory / place_of(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            text, linked = _respelled(file)
            target.write_text(text, encoding="utf-8")
            wanted += linked
        else:
            target.write_bytes(file.read_bytes())


def _respelled(page: Path) -> tuple[str, list[Path]]:
    """Return a page's text as the site wants it, and the files of the repository that it links to."""
    here, linked = place_of(page).parent, list[Path]()

    def relinked(match: re.Match[str]) -> str:
        opening, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / path))
        if not file.is_file():
            raise MissingTargetError(f"{page.relative_to(ROOT)} links to {target}, which is no file")
        linked.append(file)
        return f"{opening}{os.path.relpath(place_of(file), here)}{hash_}{anchor}"

    pieces, end, text = list[str](), 0, page.read_text(encoding="utf-8")
    for block in FENCED.finditer(text):
        pieces += _LINK.sub(relinked, text[end : block.start()]), block[0]
        end = block.end()
    pieces.append(_LINK.sub(relinked, text[end:]))
    return to_python_markdown("".join(pieces)), linked
