"""When two answers are the same."""

from __future__ import annotations

CLOSE = 1e-3


def is_same(one: object, other: object) -> bool:
    """Equal but for the last digits of floats: what a step computes together decides about those."""
    match one, other:
        case float(), float():
            return abs(one - other) <= CLOSE
        case list(), list():
            return len(one) == len(other) and all(map(is_same, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return one == other
