"""Pages for those who come from other systems name options and metrics of Baton's that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from markdown_it import MarkdownIt
from typer.core import TyperCommand, TyperGroup

from baton.cli.main import commands
from scripts.reference.metrics import all_declared
from tests.support.doc_commands import ROOT

PAGES = [ROOT / "docs" / name for name in ("from-dynamo.md", "from-llm-d.md")]


def ours(text: str) -> Iterator[str]:
    """The code in the column of Baton, the second of each table."""
    html = MarkdownIt("gfm-like", {"linkify": False}).render(text)
    for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        if cells:
            yield from re.findall(r"<code>(.*?)</code>", cells[1])


def options(command: object) -> Iterator[str]:
    """Every option of a command and of those below it."""
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from options(each)
    elif isinstance(command, TyperCommand):
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_named_exists(page: Path) -> None:
    named = list(ours(page.read_text()))
    flags = {code.split()[0] for code in named if code.startswith("--")}
    metrics = {code for code in named if code.startswith("baton_")}
    assert len(flags) > 5
    assert flags - set(options(typer.main.get_command(commands))) == set()
    assert metrics - all_declared().keys() == set()
