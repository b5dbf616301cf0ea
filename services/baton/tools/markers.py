"""Looks for a marker in a text that comes in pieces."""

from __future__ import annotations


def undecided(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text``, which does not hold ``marker``, may belong to it:
    its beginning, and white space before it, which is part of the markup if the marker comes."""
    if marker[0] not in text[1 - len(marker) :] and not text[-1:].isspace():
        return 0  # the usual case
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            break
    else:
        length = 0
    before = text[: len(text) - length]
    return len(text) - len(before.rstrip())
