"""What the documentation points at is there, and fits a terminal."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, *sorted(DOCS.rglob("*.md"))]
WIDTH = 110

SOURCES = (ROOT, ROOT / "services", ROOT / "services/baton", ROOT / "kernels", ROOT / "kernels/baton_kernels")
"""The folders that a path in backticks may begin in."""
PATH = re.compile(r"`((?:[\w.-]+/)+)([\w.-]+|\{[\w,]+\})\.(py|cpp|proto|yaml|json|md|Dockerfile)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DEFINITION = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
REFERENCE = re.compile(r"\[[^\]]+\]\[([^\]]+)\]")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def without_code(page: Path) -> str:
    """The text of a page but for its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link can name of a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    shown = (LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading) for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    defined = dict(DEFINITION.findall(without_code(page)))
    assert set(REFERENCE.findall(without_code(page))) == set(defined)
    for target in (*LINK.findall(without_code(page)), *defined.values()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name_of(page)} links to {target}, a heading that is not there"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    paths = {
        f"{folders}{name}.{ending}"
        for folders, names, ending in PATH.findall(without_code(page))
        for name in names.strip("{}").split(",")
    }
    assert {path for path in paths if not any((folder / path).exists() for folder in SOURCES)} == set()


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=name_of)
def test_what_everybody_reads_fits_a_terminal(page: Path) -> None:
    assert too_long(page.read_text()) == []


@each_page
def test_prose_fits_a_terminal(page: Path) -> None:
    """Rows of tables and what programs print may be longer: neither can be broken."""
    assert [line for line in too_long(without_code(page)) if not line.lstrip().startswith("|")] == []


def test_the_index_names_every_page() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / target).resolve() for target in LINK.findall(index.read_text()) if "://" not in target}
    pages = set(DOCS.rglob("*.md")) - {index}
    assert {name_of(page) for page in pages - linked} == set()


def test_the_readme_has_the_commands_of_ci() -> None:
    commands = re.findall(r"^make [\w-]+", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert {"make test", "make test-deep"} <= set(commands)
    assert [command for command in commands if f"`{command}`" not in README.read_text()] == []
