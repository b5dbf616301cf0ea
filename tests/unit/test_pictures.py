"""Pictures of the documentation are current, legible in light and dark, and load nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping

import pytest

from scripts.pictures.__main__ import FOLDER, PICTURES
from scripts.pictures.drawing import DARK, INKS, LIGHT, DoesNotFitError, Picture

LEGIBLE = 4.5
"""Least contrast of small text (WCAG 2, level AA)."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_current(name: str) -> None:
    svg = PICTURES[name]().svg()
    assert (FOLDER / name).read_text() == svg, "run python -m scripts.pictures, and commit the result"
    root = ET.fromstring(svg)
    assert all(child.text for child in list(root)[:2]), "a title and a description"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", svg)


def test_pictures_are_shown_in_pages() -> None:
    pages = "".join(path.read_text() for path in FOLDER.parent.rglob("*.md"))
    assert [name for name in PICTURES if f"images/{name}" not in pages] == []


@pytest.mark.parametrize(("scheme", "ink"), [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_text_is_legible_on_every_colour(scheme: Mapping[str, tuple[str, str]], ink: int) -> None:
    for tone, (area, _) in scheme.items():
        assert contrast(INKS["ink"][ink], area) > LEGIBLE, tone
    assert contrast(INKS["quiet"][ink], scheme["ground"][0]) > LEGIBLE
    for tone, (_, edge) in scheme.items():
        assert tone == "ground" or contrast(edge, scheme["ground"][0]) > 3, tone


def test_what_does_not_fit_cannot_be_drawn() -> None:
    picture = Picture(200, 100, "Small", "A small picture.")
    picture.box(10, 10, 60, 30, "fits")
    with pytest.raises(DoesNotFitError, match="'much too long' is wider than its box of 60"):
        picture.box(10, 10, 60, 30, "much too long")
    with pytest.raises(DoesNotFitError, match="the box 'far' at 150, 10 is out of the picture"):
        picture.box(150, 10, 60, 30, "far")
    with pytest.raises(DoesNotFitError, match="out of the picture"):
        picture.text(190, 50, "outside", anchor="start")


def contrast(one: str, other: str) -> float:
    """Return WCAG's contrast of two colours, 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
