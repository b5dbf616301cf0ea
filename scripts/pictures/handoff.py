"""A handoff's life: what router, prefill and decode say to each other, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.pictures.drawing import Picture, Tone

ROUTER, PREFILL, DECODE = 90, 370, 720
COLUMNS: Sequence[tuple[int, str, Tone]] = (
    (ROUTER, "router", "router"),
    (PREFILL, "prefill", "prefill"),
    (DECODE, "decode", "decode"),
)
STATES: Sequence[tuple[int, int, str]] = (
    (PREFILL, 96, "ASKED"),
    (PREFILL, 168, "COMPUTING"),
    (PREFILL, 416, "SENT"),
    (PREFILL, 480, "(forgotten)"),
    (DECODE, 128, "QUEUED"),
    (DECODE, 168, "RESERVED"),
    (DECODE, 244, "ARMED"),
    (DECODE, 432, "committed"),
)
MESSAGES: Sequence[tuple[int, int, int, str, Tone]] = (
    (ROUTER, PREFILL, 92, "submit", "router"),
    (PREFILL, DECODE, 128, "Ask: is there room?", "prefill"),
    (DECODE, PREFILL, 164, "Credit: room is promised", "decode"),
    (PREFILL, DECODE, 208, "Ready: the first blocks are computed", "prefill"),
    (DECODE, PREFILL, 246, "Grant: pages pinned, receives posted", "decode"),
    (PREFILL, ROUTER, 404, "first token", "prefill"),
    (PREFILL, DECODE, 424, "SendComplete: first token, manifest", "prefill"),
    (DECODE, PREFILL, 468, "Release", "decode"),
    (DECODE, ROUTER, 512, "tokens", "decode"),
)


def draw() -> Picture:
    """Draw the messages of a handoff from its submit to its release, and the states of both sides."""
    picture = Picture(
        900,
        560,
        "A handoff's life",
        "The router submits to prefill. Prefill asks decode for room and begins when it has credit. "
        "With the first blocks it says ready; decode pins pages, posts receives and grants. Blocks "
        "travel chunk by chunk while the next chunk is computed. The first token goes to the router "
        "and, with the manifest, to decode, which commits and releases prefill.",
    )
    for x, name, tone in COLUMNS:
        picture.line(x, 56, x, 530)
        picture.box(x - 60, 20, 120, 36, name, tone)
    for number, y in enumerate((282, 318, 354)):
        picture.arrow((PREFILL + 6, y), (DECODE - 10, y), tone="kv", wide=True)
        picture.text((PREFILL + DECODE) / 2, y - 8, f"blocks of chunk {number + 1}", ink="quiet")
        picture.text(
            PREFILL - 14,
            y + 5,
            f"computes chunk {number + 2}" if number < 2 else "all computed",
            anchor="end",
            ink="quiet",
        )
    for begin, end, y, text, tone in MESSAGES:
        step = 6 if end > begin else -6
        picture.arrow((begin + step, y), (end - step, y), tone=tone)
        if {begin, end} == {DECODE, ROUTER}:
            picture.text((PREFILL + DECODE) / 2, y - 6, text, ink="quiet")
        else:
            picture.text((begin + end) / 2, y - 6, text, ink="quiet")
    for x, y, state in STATES:
        side = 12 if x == DECODE else -14
        picture.text(
            x + side, y + (22 if x == PREFILL else 5), state, anchor="start" if x == DECODE else "end"
        )
    return picture
