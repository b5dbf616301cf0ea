"""KV blocks: a prompt's tokens in blocks, a table that names their pages, and one pool for all groups."""

from __future__ import annotations

from scripts.pictures.drawing import Picture, Tone, row

BLOCK, GAP, TOP = 190.0, 20.0, 58
PAGES: tuple[tuple[str, Tone], ...] = (
    *(("S", "router"), ("w", "decode"), ("F1", "kv"), ("w", "decode"), ("free", "plain")),
    *(("F2", "kv"), ("w", "decode"), ("F0", "kv"), ("free", "plain"), ("S", "router")),
)
"""Page → the block that lies in it, and the colour of its group."""


def draw() -> Picture:
    """Draw three blocks of a prompt, their hashes, their table, and the pool in which they lie."""
    picture = Picture(
        900,
        410,
        "KV blocks and groups",
        "The tokens of a prompt are cut into blocks. The name of a full block is a hash over its "
        "tokens and all before them, so that it can be found again. A table says in which pages of "
        "the pool a sequence's blocks lie. Layers that keep the same form a group, and all groups "
        "take pages of one size from one pool.",
    )
    picture.text(20, 36, "A prompt, in blocks of 16 tokens", anchor="start")
    lefts = row(20, BLOCK, 3, GAP)
    for number, left in enumerate(lefts):
        picture.box(left, TOP, BLOCK, 40, f"tokens {16 * number} to {16 * number + 15}", "kv")
        named = f"name {number} = H({f'name {number - 1}, ' * bool(number)}these)"
        picture.text(left + BLOCK / 2, TOP + 60, named, ink="quiet")
        if number:
            picture.arrow((left - GAP, TOP + 20), (left - 2, TOP + 20), tone="kv")
    picture.box(650, TOP, 150, 40, "tokens 48 to 53")
    picture.text(725, TOP + 60, "not full: no name yet", ink="quiet")

    picture.text(
        20, 172, "Its block table: block 0 is in page 7, block 1 in page 2, block 2 in page 5", anchor="start"
    )
    places = row(20, 82, 10, 5)
    for y, line in (
        (372, "All groups share one pool of pages of one size: F, a block of a full group (all tokens);"),
        (392, "w, of a window (the last tokens); S, a state. Nothing is divided between them beforehand."),
    ):
        picture.text(20, y, line, anchor="start", ink="quiet")
    for number, (left, (text, tone)) in enumerate(zip(places, PAGES, strict=True)):
        picture.box(left, 276, 78, 44, text, tone)
        picture.text(left + 39, 338, f"page {number}", ink="quiet")
    for number, page in enumerate((7, 2, 5)):
        left = 20 + number * 90
        picture.box(left, 188, 80, 32, f"page {page}", "kv")
        picture.arrow((left + 40, 220), (places[page] + 39, 272), tone="kv")
    return picture
