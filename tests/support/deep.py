"""Which of many parameters anyone runs, and which only ``make test-deep``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar, cast

import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")


def all_deep_but(few: int | Collection[T], values: Iterable[T]) -> list[T | ParameterSet]:
    """Return what ``parametrize`` takes: ``values``, all but these few, or the first few, marked as deep. A
    tuple holds the values of several arguments."""
    given = list(values)
    kept = given[:few] if isinstance(few, int) else [value for value in given if value in few]
    if not kept or (not isinstance(few, int) and len(kept) != len(few)):
        raise ValueError(f"not all of {few} are among {given}")
    return [value if value in kept else _deep(value) for value in given]


def _deep(value: object) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.deep], id=value.id)
    values = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.deep)
