"""What must be true of the site that was built: it loads nothing from elsewhere, and shows all there is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt

from scripts.site.pages import ROOT, place_of

LOADING: Mapping[str, tuple[str, ...]] = {
    "link": ("href",),
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
}
"""Tags and the attributes by which a browser loads something without being asked."""

COUNTED = ("h1", "h2", "h3", "h4", "li", "tr", "td", "th", "pre", "img", "blockquote")
"""Tags of which a page has as many in the site as on GitHub."""

_ELSEWHERE = re.compile(r"(?:https?:)?//")
_STYLES = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])((?:https?:)?//[^'")\s]+)""")


class _Page(HTMLParser):
    """What a page loads, and the tags of its article."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()
        self._in_article = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("rel") != "canonical":
            self.loaded += [value for name in LOADING.get(tag, ()) if (value := given.get(name))]
        if tag == "article":
            self._in_article = True
        elif self._in_article and tag in COUNTED:
            self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._in_article = False


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """Yield what pages and style sheets below ``site`` would fetch from other hosts, with where it stands."""
    for file in sorted(site.rglob("*.html")):
        for address in parsed(file.read_text(encoding="utf-8")).loaded:
            if _ELSEWHERE.match(address):
                yield f"{file.relative_to(site)}: {address}"
    for file in sorted(site.rglob("*.css")):
        for address in _STYLES.findall(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)}: {address}"


def shown_otherwise(site: Path, pages: list[Path]) -> Iterator[str]:
    """Yield, for each of the ``pages`` of the repository, the tags of which the site shows more or fewer than
    GitHub's Markdown has."""
    for page in pages:
        built = site / place_of(page).with_suffix(".html")
        counted = parsed(built.read_text(encoding="utf-8")).tags
        meant = _Page()
        meant.feed("<article>" + MarkdownIt("gfm-like", {"linkify": False}).render(page.read_text("utf-8")))
        for tag in COUNTED:
            if counted[tag] != meant.tags[tag]:
                yield f"{page.relative_to(ROOT)}: {meant.tags[tag]} <{tag}>, and {counted[tag]} in the site"


def parsed(html: str) -> _Page:
    """Return what a page of the site loads and shows."""
    page = _Page()
    page.feed(html)
    return page
