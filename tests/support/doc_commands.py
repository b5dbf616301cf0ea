"""The commands that the documentation tells a reader to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("", "sh", "bash", "console")
"""What a block of commands may be marked as; with none of these it is of another language."""
PROGRAMS = ("baton", "python", "make", "curl", "helm", "kubectl", "docker", "pip", "git", "tar", "export")
"""Words that a block of commands begins with, apart from paths of scripts."""

INLINE = tuple(f"python -m {package}." for package in ("loadtest", "scripts", "tests"))
"""The beginnings of commands that sentences have."""

_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_OPERATORS = {"|", "&", "&&", "||", ";", ">", "<"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``page`` and ``line`` are where it stands."""

    page: Path
    line: int
    words: tuple[str, ...]
    """The program without its folder, then its arguments; without variables in front."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"


def commands() -> Iterator[Command]:
    """Yield every command in the blocks of all pages, but for what comes behind a pipe, and those of
    `INLINE` in sentences."""
    parser = MarkdownIt()
    for page in PAGES:
        for token in parser.parse(page.read_text(encoding="utf-8")):
            if token.type == "fence" and token.info.strip() in SHELL and token.map:
                yield from _of_block(page, token.map[0] + 1, token.content.splitlines())
            for child in token.children or ():
                if child.type == "code_inline" and child.content.startswith(INLINE) and token.map:
                    yield Command(page, token.map[0] + 1, _words(child.content))


def _of_block(page: Path, start: int, lines: Sequence[str]) -> Iterator[Command]:
    first = next((line for line in lines if line.strip() and not line.strip().startswith("#")), "")
    prompted = first.startswith("$ ")
    if not prompted and not _is_command(first):
        return
    at = 0
    while at < len(lines):
        begin, text = at, lines[at]
        at += 1
        if prompted:
            if not text.startswith("$ "):
                continue  # what the command before printed
            text = text[2:]
        while _goes_on(text) and at < len(lines):
            text = (
                f"{text.removesuffix(chr(92))}\n{lines[at]}"
                if text.endswith("\\")
                else f"{text}\n{lines[at]}"
            )
            at += 1
        words = _words(text)
        if words:
            yield Command(page, start + begin + 1, words)


def _is_command(line: str) -> bool:
    words = _words(line) if not _goes_on(line) else _words(line.rstrip("\\") + "'" * (line.count("'") % 2))
    return bool(words) and (words[0] in PROGRAMS or (ROOT / line.split()[0]).is_file())


def _goes_on(text: str) -> bool:
    """Whether a command ends on a later line: after a backslash, or inside of quotes."""
    if text.endswith("\\"):
        return True
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _words(text: str) -> tuple[str, ...]:
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return ()
    until = next((at for at, word in enumerate(words) if word in _OPERATORS), len(words))
    words = words[:until]
    while words and _ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    if words and not words[0].startswith(("scripts/", ".ci/")):
        words[0] = words[0].rpartition("/")[2]
    return tuple(words)
