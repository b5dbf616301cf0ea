"""Chunked prefill: a long prompt beside answers that are being written."""

from __future__ import annotations

from scripts.pictures.drawing import Picture

LEFT, ROW = 190, 22
ANSWERS = 3


def draw() -> Picture:
    """Draw the steps of a worker with a prompt computed at once, and in chunks."""
    picture = Picture(
        900,
        400,
        "Chunked prefill beside the decode batch",
        "Three answers are being written when a long prompt comes. Computed at once, it makes one "
        "long step, and the answers wait for it. In chunks, each step has one token of every answer "
        "and a piece of the prompt: the answers go on at an even pace, and the prompt's first token "
        "comes a little later.",
    )
    picture.text(20, 34, "The prompt at once: one long step, in which no answer gets a token", anchor="start")
    _steps(picture, 50, (60, 60, 400, 60, 60), whole=2)
    picture.text(
        20, 214, "In chunks: every step has a token of each answer, and a piece of the prompt", anchor="start"
    )
    _steps(picture, 230, (60, 60, 100, 100, 100, 100, 60, 60), chunks=(2, 3, 4, 5))
    picture.text(20, 385, "time", anchor="start", ink="quiet")
    picture.arrow((62, 380), (870, 380))
    return picture


def _steps(
    picture: Picture,
    top: float,
    widths: tuple[int, ...],
    whole: int | None = None,
    chunks: tuple[int, ...] = (),
) -> None:
    """Draw the steps of one worker, side by side."""
    for number in range(ANSWERS):
        picture.text(LEFT - 12, top + 16 + number * ROW, f"answer {number}", anchor="end", ink="quiet")
    picture.text(LEFT - 12, top + 16 + ANSWERS * ROW + 10, "prompt", anchor="end", ink="quiet")
    left = float(LEFT)
    for step, width in enumerate(widths):
        if step != whole:
            for number in range(ANSWERS):
                picture.box(left, top + number * ROW, width - 6, ROW - 4, tone="decode")
        if step == whole or step in chunks:
            text = "whole prompt" if step == whole else f"chunk {chunks.index(step)}"
            picture.box(left, top + ANSWERS * ROW + 4, width - 6, 34, text, "prefill")
        left += width
