"""Which of many parameters anyone runs, and which only ``make test-deep``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

deep = pytest.mark.deep


def all_deep_but(few: Collection[object], values: Iterable[object]) -> list[object]:
    """Return the values for ``parametrize``: all but these few are deep."""
    given = list(values)
    missing = [value for value in few if value not in given]
    assert not missing, f"no such values: {missing}"
    return [value if value in few else pytest.param(value, marks=deep) for value in given]
