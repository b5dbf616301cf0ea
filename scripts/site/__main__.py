"""Builds the documentation as a site, in build/site, and checks it: ``make docs``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from scripts.site.check import loaded_from_elsewhere, shown_otherwise
from scripts.site.navigation import navigation
from scripts.site.pages import PLACES, ROOT, MissingTargetError, lay_out

BUILD = ROOT / "build"
PAGES, SITE, CONFIG = BUILD / "pages", BUILD / "site", BUILD / "mkdocs.yml"


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    try:
        lay_out(PAGES)
    except MissingTargetError as error:
        sys.exit(f"error: {error}")
    # Paths of a configuration that another one inherits from are taken from where the heir lies.
    places = {"docs_dir": str(PAGES), "site_dir": str(SITE)}
    heir = {"INHERIT": "../mkdocs.yml", **places, "nav": navigation()}
    CONFIG.write_text(json.dumps(heir, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(CONFIG)]
    built = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if built.returncode:
        sys.exit(built.returncode)
    pages = [*PLACES, *sorted((ROOT / "docs").rglob("*.md"))]
    faults = [*loaded_from_elsewhere(SITE), *shown_otherwise(SITE, pages)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}; begin with index.html")


if __name__ == "__main__":
    main()
