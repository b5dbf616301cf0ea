"""What became of what was sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """Of one target."""

    target: str
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, outcome: str) -> None:
        self.sent += 1
        self.outcomes[outcome] += 1

    def blame(self, violation: str) -> None:
        """Something that must not happen, with what it takes to see it again."""
        self.violations.append(violation)
