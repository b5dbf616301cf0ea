"""A picture as SVG: boxes, texts and arrows on a ground of their own, in the reader's light or dark.

Colours are classes, so that a picture shown in a page follows the reader's scheme without a script. Text is
measured roughly, and a picture in which it would not fit cannot be made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Tone = Literal["plain", "router", "prefill", "decode", "kv", "lost"]
"""What a box is: each role has a colour, KV blocks have one, and so has what is lost."""
Anchor = Literal["start", "middle", "end"]

SIZE = 14
"""Pixels of the letters."""
LINE = 18
"""Pixels from one line of text to the next."""
LETTER = 0.58
"""Width of a letter in the mean, as a share of its size: of DejaVu Sans, which is a wide one."""

LIGHT: Mapping[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#d0d7de"),
    "plain": ("#f3f5f8", "#6e7781"),
    "router": ("#f1e6fd", "#7a33c4"),
    "prefill": ("#ddeafd", "#1d5fd1"),
    "decode": ("#daf3e0", "#1a7f37"),
    "kv": ("#fdf0c8", "#9a6700"),
    "lost": ("#fde3e1", "#c62828"),
}
"""Tone → the colours of its area and of its line."""
DARK: Mapping[str, tuple[str, str]] = {
    "ground": ("#14181f", "#3d444d"),
    "plain": ("#232a33", "#9198a1"),
    "router": ("#342150", "#b98af0"),
    "prefill": ("#152c52", "#6ca4f8"),
    "decode": ("#123a20", "#4fc46f"),
    "kv": ("#443108", "#dcae3d"),
    "lost": ("#4d1b1b", "#f47d74"),
}
INKS: Mapping[str, tuple[str, str]] = {"ink": ("#1f2328", "#f0f3f6"), "quiet": ("#4d5560", "#b3bcc7")}
"""Class of a text → its colour in light and in dark."""


class DoesNotFitError(ValueError):
    """A text is wider than what it stands in. The message names it."""


@dataclass
class Picture:
    """A picture of ``width`` by ``height`` pixels, with ``title`` and ``description`` to be read aloud."""

    width: int
    height: int
    title: str
    description: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, anchor: Anchor = "middle", ink: str = "ink") -> None:
        """Write one line whose base is at ``y``."""
        wide = width_of(text)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        if left < 0 or left + wide > self.width:
            raise DoesNotFitError(f"{self.title}: {text!r} at {x} is out of the picture")
        self.parts.append(
            f'<text class="{ink}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", tone: Tone = "plain"
    ) -> None:
        """Draw a box with the lines of ``text`` in its middle."""
        if x < 0 or x + width > self.width or y + height > self.height:
            raise DoesNotFitError(f"{self.title}: the box {text!r} at {x:g}, {y:g} is out of the picture")
        self.parts.append(
            f'<rect class="{tone}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * LINE / 2 + SIZE * 0.36
        for number, line in enumerate(lines):
            if width_of(line) > width - 6:
                raise DoesNotFitError(f"{self.title}: {line!r} is wider than its box of {width:g}")
            self.text(x + width / 2, top + number * LINE, line)

    def arrow(
        self, *points: tuple[float, float], tone: Tone = "plain", wide: bool = False, dashed: bool = False
    ) -> None:
        """Draw an arrow along ``points``. A ``wide`` one carries much; a ``dashed`` one stands for others."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        style = ' stroke-width="5"' if wide else ' stroke-width="1.8"'
        style += ' stroke-dasharray="6 5"' if dashed else ""
        self.parts.append(
            f'<polyline class="way {tone}" points="{way}"{style} marker-end="url(#{tone}{"-wide" * wide})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, tone: Tone = "plain") -> None:
        """Draw a thin dotted line."""
        points = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line class="way {tone}" {points} stroke-dasharray="2 4"/>')

    def svg(self) -> str:
        """Return the picture as the text of a file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title about">'
        )
        size = f'width="{self.width - 1}" height="{self.height - 1}"'
        ground = f'<rect class="ground" x="0.5" y="0.5" {size} rx="8"/>'
        lines = [
            *(head, "<!-- Drawn by python -m scripts.pictures. -->"),
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="about">{escape(self.description)}</desc>',
            *("<style>", *_styles(), "</style>", "<defs>", *_heads(), "</defs>"),
            *(ground, *self.parts, "</svg>", ""),
        ]
        return "\n".join(lines)


def row(x: float, width: float, count: int, gap: float = 0.0) -> Sequence[float]:
    """Return the left edges of ``count`` boxes of ``width`` side by side."""
    return [x + number * (width + gap) for number in range(count)]


def width_of(text: str) -> float:
    """Return about how many pixels a line of text takes, rather too many."""
    return len(text) * SIZE * LETTER


def _styles() -> Iterator[str]:
    yield f"text {{ font: {SIZE}px system-ui, 'DejaVu Sans', sans-serif; }}"
    yield ".way { fill: none; }"
    yield from _colours(LIGHT, {name: inks[0] for name, inks in INKS.items()})
    yield "@media (prefers-color-scheme: dark) {"
    yield from _colours(DARK, {name: inks[1] for name, inks in INKS.items()})
    yield "}"


def _colours(tones: Mapping[str, tuple[str, str]], inks: Mapping[str, str]) -> Iterator[str]:
    for tone, (area, edge) in tones.items():
        yield f"rect.{tone} {{ fill: {area}; stroke: {edge}; }}"
        yield f".way.{tone} {{ stroke: {edge}; }} path.{tone} {{ fill: {edge}; }}"
    for name, ink in inks.items():
        yield f"text.{name} {{ fill: {ink}; }}"


def _heads() -> Iterator[str]:
    for tone in LIGHT:
        for name, size in ((tone, 7), (f"{tone}-wide", 2.6)):
            yield (
                f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="{size}" '
                f'markerHeight="{size}" orient="auto"><path class="{tone}" d="M0,0 L10,5 L0,10 z"/></marker>'
            )
