"""The role that a process has now, and its counts in each role that it had."""

from __future__ import annotations

import threading
from collections.abc import Mapping

Series = tuple[str, ...]
"""A counter's name and its labels without the role."""


class CountedByRole:
    """Splits the counts of a process since its start by the role in which they were made.

    A worker's engine counts on when its role changes. If the whole count were exported under the current
    role, a rate across two changes would have the work of both roles. Any thread may call.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._lock = threading.Lock()
        self._totals: dict[Series, float] = {}
        """The counts at the last scrape."""
        self._before: dict[Series, dict[str, float]] = {}
        """The counts up to the last change of role, by role."""

    @property
    def role(self) -> str:
        """The current role."""
        return self._role

    def split(self, series: Series, total: float) -> Mapping[str, float]:
        """Split ``total`` by role: the current role, and each earlier role that has a part of it."""
        with self._lock:
            self._totals[series] = total
            return self._split(series, total)

    def _split(self, series: Series, total: float) -> dict[str, float]:
        before = self._before.get(series, {})
        lately = total - sum(before.values())
        return before | {self._role: before.get(self._role, 0.0) + lately}

    def change(self, role: str) -> None:
        """Change the role. Must be called right after all metrics were collected."""
        with self._lock:
            self._before = {series: self._split(series, total) for series, total in self._totals.items()}
            self._role = role
