"""A line of the report: what was looked at, a verdict, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Judgement(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; the services run without it."""
    LACK = "lack"
    """A service cannot start, or cannot do what it was asked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing. A lack always says what to do."""

    name: str
    verdict: Judgement
    says: str
    do: str = ""

    def __post_init__(self) -> None:
        if self.verdict is Judgement.LACK and not self.do:
            raise ValueError(f"the lack {self.name!r} does not say what to do")


def ok(name: str, says: str) -> Finding:
    return Finding(name, Judgement.OK, says)


def note(name: str, says: str, do: str = "") -> Finding:
    return Finding(name, Judgement.NOTE, says, do)


def lack(name: str, says: str, do: str) -> Finding:
    return Finding(name, Judgement.LACK, says, do)


def missing(name: str, says: str, do: str, *, needed: bool) -> Finding:
    """Something that is not there: a lack where it is ``needed``, else a note."""
    return lack(name, says, do) if needed else note(name, says, do)
