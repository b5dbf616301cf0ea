"""The role that a process has now, and what it counted in each that it had."""

from __future__ import annotations

import threading
from collections.abc import Mapping

Series = tuple[str, ...]
"""A counter's name, and its labels but for the role."""


class CountedByRole:
    """Splits what a process has counted since its start by the role in which it did.

    A worker's engine counts on when the role changes. Were all of it shown under the role of the day, a rate
    over a change there and back would have the work of both. Any thread.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._lock = threading.Lock()
        self._totals: dict[Series, float] = {}
        """As they were last asked for."""
        self._before: dict[Series, dict[str, float]] = {}
        """By the roles that it had, up to the last change."""

    @property
    def role(self) -> str:
        """The one that it has."""
        return self._role

    def split(self, series: Series, total: float) -> Mapping[str, float]:
        """``total`` by role: those that it had, as far as they counted any of it, and the one that it has."""
        with self._lock:
            self._totals[series] = total
            return self._split(series, total)

    def _split(self, series: Series, total: float) -> dict[str, float]:
        before = self._before.get(series, {})
        lately = total - sum(before.values())
        return before | {self._role: before.get(self._role, 0.0) + lately}

    def change(self, role: str) -> None:
        """Another role from now on: to be called right after everything was collected."""
        with self._lock:
            self._before = {series: self._split(series, total) for series, total in self._totals.items()}
            self._role = role
