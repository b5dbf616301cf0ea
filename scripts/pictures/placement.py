"""Placement: the ways to answer a request, each with what it is estimated to cost."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.pictures.drawing import Picture, Tone

LEFT, BAR = 250.0, 44
WAYS: Sequence[tuple[str, Sequence[tuple[str, float, Tone]]]] = (
    (
        "prefill 0, decode 0",
        (
            ("queue", 150, "plain"),
            ("compute", 190, "prefill"),
            ("handoff", 80, "kv"),
            ("stream", 120, "decode"),
        ),
    ),
    (
        "prefill 1, decode 0",
        (("compute", 100, "prefill"), ("handoff", 80, "kv"), ("stream", 120, "decode")),
    ),
    (
        "decode 1 alone",
        (("compute", 230, "prefill"), ("stream", 150, "decode"), ("harm", 160, "lost")),
    ),
)
"""Way → the parts of its cost: name, width in pixels, colour."""


def draw() -> Picture:
    """Draw three ways to answer a request, of which the cheapest is taken."""
    picture = Picture(
        900,
        330,
        "Placement: the cheapest way is taken",
        "For each pair of a prefill and a decode worker, and for each decode worker alone, the router "
        "estimates in seconds: the queue, computing what is not cached, the handoff, the stream, and "
        "the harm to other streams. Prefill 1 has much of the prompt in its cache, so that its pair "
        "costs least.",
    )
    picture.text(
        20, 34, "cost = TTFT (queue + compute + handoff + wait) + stream + harm, in seconds", anchor="start"
    )
    for number, (way, parts) in enumerate(WAYS):
        y = 62 + number * 70
        picture.text(LEFT - 14, y + BAR / 2 + 5, way, anchor="end")
        left = LEFT
        for name, width, tone in parts:
            picture.box(left, y, width - 2, BAR, name, tone)
            left += width
        if number == 1:
            picture.text(left + 14, y + BAR / 2 + 5, "taken: has much of it cached", anchor="start")
    picture.text(
        20,
        290,
        "harm: what running answers at decode 1 would wait while the prompt is computed there.",
        anchor="start",
        ink="quiet",
    )
    picture.text(
        20,
        310,
        "The router knows caches exactly, and loads and speeds as workers report them.",
        anchor="start",
        ink="quiet",
    )
    return picture
