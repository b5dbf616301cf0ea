"""What a campaign writes down: what it did, and what must not have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.chaos.catalogue import Question
from tests.support.chaos.client import Reply, verdict

RECENT = 8


@dataclass
class Violation:
    """Something that must not be, and what had been done until then."""

    moment: str
    what: str
    details: list[str]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.moment}: {self.what}", *self.details])


@dataclass
class Findings:
    moment: str = "before the first round"
    """Where the campaign is."""
    history: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def did(self, what: str) -> None:
        self.history.append(f"{self.moment}: {what}")

    def violation(self, what: str, details: Sequence[str] = ()) -> None:
        done = self.history[-RECENT:]
        self.violations.append(Violation(self.moment, what, [*details, *(["after:", *done] if done else [])]))

    def check(self, question: Question, reply: Reply) -> None:
        """Compare what came back with what is true."""
        wrong = verdict(question, reply)
        if wrong is not None:
            details = [
                f"request:  {question.body}",
                f"expected: {list(question.answer)}",
                f"got:      {reply.token_ids} ({reply.finish_reason or reply.failure or 'left'})",
            ]
            self.violation(f"{wrong}, asked {question.name}", details)
