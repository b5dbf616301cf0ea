"""A failover: a decode worker dies, and the answer goes on elsewhere, from its tokens."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.pictures.drawing import Picture, Tone

LEFT, CELL, HIGH = 130.0, 42.0, 34
PROMPT, AGAIN = 80.0, 140.0
LANES = {"prefill 0": 44, "decode 0": 104, "decode 1": 164, "client": 244}
"""The top of each one's boxes, by name."""


def draw() -> Picture:
    """Draw an answer of ten tokens, of which six are written before its worker dies."""
    picture = Picture(
        900,
        340,
        "A lost worker costs a pause and no token",
        "Prefill 0 computes the prompt and token 1, decode 0 writes tokens 2 to 6 and dies. The "
        "router has them, and submits the prompt with the six tokens as a new attempt. Prefill 0 "
        "computes both and token 7, and decode 1 writes 8 to 10. The client sees a pause, and each "
        "token once.",
    )
    for name, y in LANES.items():
        picture.text(LEFT - 16, y + 22, name, anchor="end")
    first = LEFT + PROMPT
    second = first + 6 * CELL + 60 + 40 + AGAIN
    picture.box(LEFT, LANES["prefill 0"], PROMPT - 4, HIGH, "prompt", "prefill")
    _tokens(picture, "prefill 0", first, (1,), "prefill")
    _tokens(picture, "decode 0", first + CELL, range(2, 7), "decode")
    dies = first + 6 * CELL
    picture.box(dies, LANES["decode 0"], 60, HIGH, "dies", "lost")
    picture.box(second - AGAIN, LANES["prefill 0"], AGAIN - 4, HIGH, "prompt, 1 to 6", "prefill")
    _tokens(picture, "prefill 0", second, (7,), "prefill")
    _tokens(picture, "decode 1", second + CELL, range(8, 11), "decode")
    _tokens(picture, "client", first, range(1, 7), "plain")
    _tokens(picture, "client", second, range(7, 11), "plain")
    up = LANES["prefill 0"] + HIGH / 2
    picture.arrow(
        (dies + 30, LANES["decode 0"] - 2), (dies + 30, up), (second - AGAIN - 5, up), tone="router"
    )
    picture.text(
        dies + 78,
        LANES["decode 0"] + 14,
        "the router notices, at once or after",
        anchor="start",
        ink="quiet",
    )
    picture.text(
        dies + 78, LANES["decode 0"] + 32, "2 s of silence, and tries again", anchor="start", ink="quiet"
    )
    picture.text((dies + second) / 2, LANES["client"] + 22, "a pause", ink="quiet")
    picture.text(
        LEFT,
        312,
        "A request is its tokens. Sampling is seeded: 7 to 10 are what decode 0 would have written.",
        anchor="start",
    )
    return picture


def _tokens(picture: Picture, lane: str, left: float, numbers: Iterable[int], tone: Tone) -> None:
    for at, number in enumerate(numbers):
        picture.box(left + at * CELL, LANES[lane], CELL - 4, HIGH, str(number), tone)
