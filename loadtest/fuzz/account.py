"""The account of a fuzz run: the requests sent, their answers and the violations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """The account of one target."""

    target: str
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, outcome: str) -> None:
        self.sent += 1
        self.outcomes[outcome] += 1

    def blame(self, violation: str) -> None:
        """Record a violation, with the input that reproduces it."""
        self.violations.append(violation)
