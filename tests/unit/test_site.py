"""The site shows what GitHub shows, leads where the pages lead, and loads nothing from elsewhere.

`make docs` builds it, which needs mkdocs; what it is built from, and what checks it, is tried here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts.site import pages
from scripts.site.check import loaded_from_elsewhere, shown_otherwise
from scripts.site.markdown import to_python_markdown
from scripts.site.navigation import Section, navigation
from scripts.site.pages import PLACES, ROOT, MissingTargetError, lay_out, place_of

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    lay_out(directory)
    return directory


def test_links_lead_to_files_of_the_site(laid_out: Path) -> None:
    found = 0
    for page in laid_out.rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in LINK.findall(text):
            if "://" not in target and not target.startswith("#"):
                found += 1
                assert (page.parent / target.partition("#")[0]).is_file(), f"{page.name}: {target}"
    assert found > 300


def test_files_of_the_repository_come_along(laid_out: Path) -> None:
    values = laid_out / "repository/helm/baton/values.yaml"
    assert values.read_bytes() == (ROOT / "helm/baton/values.yaml").read_bytes()
    assert "(repository/helm/baton/values.yaml)" in (laid_out / "install.md").read_text()
    assert "(contributing.md)" in (laid_out / "pages.md").read_text()
    assert "](images/ring.svg)" in (laid_out / "index.md").read_text()


def test_a_link_to_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("See [b](b.md#part).\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PLACES", {})
    with pytest.raises(MissingTargetError, match=r"docs/a\.md links to b\.md#part, which is no file"):
        lay_out(tmp_path / "site")


def test_the_navigation_has_every_page_once() -> None:
    def flat(entries: list[str | Section]) -> list[str]:
        return [
            page
            for entry in entries
            for page in ([entry] if isinstance(entry, str) else flat(next(iter(entry.values()))))
        ]

    listed = flat(navigation())
    there = {place_of(page).as_posix() for page in (*PLACES, *(ROOT / "docs").rglob("*.md"))}
    assert len(set(listed)) == len(listed)
    assert set(listed) == there
    assert listed[0] == "index.md"


def test_the_site_asks_nobody_for_fonts_or_scripts() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert not {"repo_url", "extra_css", "extra_javascript"} & config.keys()
    assert config["validation"]["links"]["anchors"] == "warn"  # which ends a strict build


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Text:\n- a\n- b\n", "Text:\n\n- a\n- b\n"),
        ("1. a\n   more\n   - b\n     c\n2. d\n", "1. a\n    more\n    - b\n        c\n2. d\n"),
        ("1. a\n\n   | x |\n   |---|\n   | y |\n", "1. a\n\n    | x |\n    |---|\n    | y |\n"),
        ("- a\n\n  ```\n  code\n    in\n  ```\n", "- a\n\n    ```\n    code\n      in\n    ```\n"),
        ("Text\n| x |\n|---|\n| `a\\|b` |\n", "Text\n\n| x |\n|---|\n| `a|b` |\n"),
        ("in the year\n1999. It was\n", "in the year\n1999. It was\n"),
        ("```\n- no list\n| x |\n```\n", "```\n- no list\n| x |\n```\n"),
    ],
)
def test_what_github_reads_is_spelled_for_python_markdown(written: str, wanted: str) -> None:
    assert to_python_markdown(written) == wanted


def test_what_a_browser_would_fetch_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://docs.example/a"><a href="https://elsewhere.example">x</a>'
        '<script src="assets/x.js"></script><script src="https://cdn.example/x.js"></script>'
        '<img src="//cdn.example/x.png"><link rel="stylesheet" href="http://fonts.example/x.css">'
    )
    (tmp_path / "a.css").write_text("a{background:url('https://cdn.example/y.png')} b{background:url(y.png)}")
    assert list(loaded_from_elsewhere(tmp_path)) == [
        "a.html: https://cdn.example/x.js",
        "a.html: //cdn.example/x.png",
        "a.html: http://fonts.example/x.css",
        "a.css: https://cdn.example/y.png",
    ]


def test_what_the_site_lost_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs/status.md"
    (tmp_path / "status.html").write_text("<article><h1>Status</h1></article>")
    lost = list(shown_otherwise(tmp_path, [page]))
    assert any(re.fullmatch(r"docs/status\.md: \d+ <li>, and 0 in the site", line) for line in lost)
    assert not any("<h1>" in line for line in lost)
