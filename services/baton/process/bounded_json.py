"""JSON from files that nobody vouches for."""

from __future__ import annotations

import json
from collections.abc import Iterable

MOST_DEPTH = 64
"""Most objects and lists within each other."""
_TOO_DEEP = f"nested deeper than {MOST_DEPTH} levels"


def parse_json(text: str | bytes) -> object:
    """The value that ``text`` is. ValueError if it is no JSON or nested deeper than ``MOST_DEPTH``: what goes
    through the value may call itself once for each level."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = _containers([value])
    for _ in range(MOST_DEPTH):
        level = [
            part for each in level for part in _containers(each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


def _containers(values: Iterable[object]) -> list[dict[str, object] | list[object]]:
    return [each for each in values if isinstance(each, dict | list)]
