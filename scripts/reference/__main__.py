"""Writes the pages of docs/reference from the code: ``python -m scripts.reference``. A test compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scripts.reference import alerts, api, fields, metrics, options, values
from scripts.site.pages import ROOT

PAGES: Mapping[str, Callable[[], str]] = {
    "options.md": options.page,
    "values.md": values.page,
    "metrics.md": metrics.page,
    "alerts.md": alerts.page,
    "api.md": api.page,
    "fields.md": fields.page,
}
FOLDER = ROOT / "docs/reference"


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
