"""What has become of a request's attempts, and which request may be why workers died.

A worker that dies takes everything down that was on it, and one of these requests may be the reason. So that
this one does not kill every worker of a fleet, and its neighbours are not blamed for it:

- A death counts against every request that was there, until the request has got on by ``PAST`` tokens
  elsewhere: what kills a worker when it is computed kills the next one at the same place.
- A request with two deaths is a suspect. If all suspects of a death are of one client's request, that is
  given up on: it was what two workers that died had in common.
- Otherwise they are watched one after the other: while one runs, no other suspect does. Whoever gets on is a
  suspect no more; the one under which a third worker dies is given up on.

So a request that kills is given up on after two workers, or three if others were with it both times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

PAST = 8
"""Tokens beyond those delivered when a worker died, until it is clear that they were not why. More than a
worker can have computed without their having been delivered, in all but rare cases."""
SUSPECT_AFTER = 2


class Origin:
    """One client's request: its answers are blamed together, as they compute the same prompt."""


@dataclass(slots=True, eq=False)
class Trail:
    """Of one answer, or of those that are under way as one."""

    origin: Origin = field(default_factory=Origin)
    failures: int = 0
    """Attempts that failed, for whatever reason but that a worker drains."""
    deaths: int = 0
    """Of workers that it was on, since it last got on."""
    to_pass: int = 0
    """Tokens with which it has got on."""
    watched: bool = False
    """It runs while no other suspect does."""

    def fork(self) -> Trail:
        """For an answer that goes its own way from here."""
        return replace(self)

    def got_to(self, num_tokens: int) -> bool:
        """So many tokens are delivered; True if it is clear now that it was not why workers died."""
        if not self.deaths or num_tokens < self.to_pass:
            return False
        self.deaths, self.watched = 0, False
        return True


class Suspects:
    """Who is blamed, and which suspect runs now. Pure: no clock, no I/O."""

    def __init__(self) -> None:
        self._running: set[Trail] = set()
        """Suspects that run, all of one origin."""

    def died(self, present: Iterable[tuple[Trail, int]]) -> set[Trail]:
        """A worker died with these on it, so many tokens of each delivered. Those to give up on."""
        suspects: list[Trail] = []
        for trail, num_tokens in present:
            trail.got_to(num_tokens)
            trail.deaths += 1
            trail.to_pass = num_tokens + PAST
            self.leave(trail)
            if trail.deaths >= SUSPECT_AFTER:
                suspects.append(trail)
        if len({trail.origin for trail in suspects}) == 1:
            return set(suspects)
        for trail in suspects:
            trail.watched = True
        return set()

    def enter(self, trail: Trail) -> bool:
        """A suspect is to run. False: another one does."""
        if any(other.origin is not trail.origin for other in self._running):
            return False
        self._running.add(trail)
        return True

    def leave(self, trail: Trail) -> bool:
        """It runs no more, or is no suspect any more. True if it did run: another may now."""
        if trail not in self._running:
            return False
        self._running.remove(trail)
        return True
