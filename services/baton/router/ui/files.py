"""The files of the live page, by the paths at which they are served: a closed list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, and its media type."""

    source: Traversable
    kind: str

    def content(self) -> bytes:
        return self.source.read_bytes()


def _found(folder: Traversable, path: str) -> Iterator[tuple[str, PageFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _found(entry, f"{path}/{entry.name}")
        elif entry.name == _INDEX:
            yield path, PageFile(entry, _KINDS[".html"])
        elif (kind := _KINDS.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            yield f"{path}/{entry.name}", PageFile(entry, kind)


PAGE_FILES: Mapping[str, PageFile] = MappingProxyType(dict(_found(files("baton.router.ui") / "page", "/ui")))
"""All files of the package that a browser asks for. They reveal nothing: where there are keys, the figures
need one."""
