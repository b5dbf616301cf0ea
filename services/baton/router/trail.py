"""What has become of a request's attempts, and which request may be why workers died.

A worker that dies takes everything down that was on it, and one of these requests may be the reason. So that
this one does not kill every worker of a fleet, and its neighbours are not blamed for it:

- A death counts against every request that was being computed there, until the request has got on by ``PAST``
  tokens elsewhere: what kills a worker when it is computed kills the next one at the same place.
- A request with two deaths is a suspect. If all suspects of a death are of one client's request, that is
  given up on: it is what two workers that died had in common. But not if others died within a minute that did
  not compute it: where workers die of something else, they may have met it twice by chance.
- Otherwise suspects are watched one after the other: while one runs, no other suspect does. Whoever gets on
  is a suspect no more; the one under which a third worker dies is given up on.

So a request that kills is given up on after two workers, or three if others were with it both times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

PAST = 8
"""Tokens beyond those delivered when a worker died, until it is clear that they were not why. More than a
worker can have computed without their having been delivered, in all but rare cases."""
SUSPECT_AFTER = 2
RECENT_S = 60.0
MOST_DEATHS = 256
"""That are remembered."""


class Origin:
    """One client's request: its answers are blamed together, as they compute the same prompt."""


@dataclass(slots=True, eq=False)
class Trail:
    """Of one answer, or of those that are under way as one."""

    origin: Origin = field(default_factory=Origin)
    failures: int = 0
    """Attempts that failed, but for those that were refused and those whose worker drains."""
    in_vain: int = 0
    """Those of them that were begun, since tokens have come from decode: where workers die all the time, an
    answer that gets on in between is not given up on."""
    unbegun: int = 0
    """Those of which nothing was begun, since then: it only stood in line where a worker died."""
    deaths: int = 0
    """Of workers that it was on, since it last got on."""
    to_pass: int = 0
    """Tokens with which it has got on."""
    watched: bool = False
    """It runs while no other suspect does."""

    def failed(self, *, computed: bool) -> None:
        """An attempt has; ``computed``: somebody had begun to."""
        self.failures += 1
        if computed:
            self.in_vain += 1
        else:
            self.unbegun += 1

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
        self._deaths: deque[tuple[float, frozenset[Origin]]] = deque(maxlen=MOST_DEATHS)
        """When each was, and what was computed there."""
        self._running: set[Trail] = set()
        """Suspects that run, all of one origin."""

    def died(self, present: Sequence[tuple[Trail, int]], now: float) -> set[Trail]:
        """A worker died that computed these, so many tokens of each delivered. Those to give up on."""
        self._deaths.append((now, frozenset(trail.origin for trail, _ in present)))
        suspects: list[Trail] = []
        for trail, num_tokens in present:
            trail.got_to(num_tokens)
            trail.deaths += 1
            trail.to_pass = num_tokens + PAST
            self.leave(trail)
            if trail.deaths >= SUSPECT_AFTER:
                suspects.append(trail)
        watched = {trail for trail in suspects if trail.watched}  # of one origin: no other one ran
        if watched:
            guilty = watched
        else:
            origins = {trail.origin for trail in suspects}
            guilty = set(suspects) if len(origins) == 1 and self._in_all_deaths(origins, now) else set()
        for trail in suspects:
            trail.watched = trail not in guilty
        return guilty

    def _in_all_deaths(self, origins: set[Origin], now: float) -> bool:
        """Of the last minute."""
        return all(origins <= there for at, there in self._deaths if now - at < RECENT_S)

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
