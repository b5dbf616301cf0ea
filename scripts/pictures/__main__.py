"""Draws the pictures of the documentation: ``python -m scripts.pictures``. A test compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scripts.pictures import blocks, chunks, failover, handoff, placement, ring
from scripts.pictures.drawing import Picture
from scripts.site.pages import ROOT

PICTURES: Mapping[str, Callable[[], Picture]] = {
    "ring.svg": ring.draw,
    "handoff.svg": handoff.draw,
    "kv-blocks.svg": blocks.draw,
    "chunked-prefill.svg": chunks.draw,
    "placement.svg": placement.draw,
    "failover.svg": failover.draw,
}
FOLDER = ROOT / "docs/images"


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
