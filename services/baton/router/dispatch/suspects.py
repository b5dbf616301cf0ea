"""The retry state of requests, and the search for a request that makes workers die.

A worker that dies ends every request that ran on it, and one of them may be the cause. So that this request
does not kill every worker of a fleet, and its neighbours are not blamed for it:

- A death counts against every request that was being computed there, until the request is ``PAST`` tokens
  further on another worker: a request that kills a worker kills the next one at the same token.
- A request with two deaths is a suspect. If all suspects of a death belong to one client's request, the
  router gives up on that request: it is what both workers had in common. The exception is a third worker that
  died within the last minute without having computed it: where workers die of something else, two of them may
  have had the request by chance.
- Otherwise suspects are watched one after the other: while one runs, no other suspect does. A suspect that
  makes progress is cleared; one under which a third worker dies is given up on.

So a request that kills is given up on after two workers, or after three if others ran beside it both times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

PAST = 8
"""Tokens that a request has to get beyond those delivered when a worker died, to be cleared of that death.
More than a worker can have computed and not delivered, in all but rare cases."""
SUSPECT_AFTER = 2
RECENT_S = 60.0
MAX_DEATHS = 256
"""Most deaths that are remembered."""


class BlamedRequest:
    """One client's request: its answers are blamed together, as they compute the same prompt."""


@dataclass(slots=True, eq=False)
class RetryState:
    """The failures and deaths of one answer, or of a group of answers before they part."""

    origin: BlamedRequest = field(default_factory=BlamedRequest)
    failures: int = 0
    """Attempts that failed, without those that were refused or whose worker drained."""
    in_vain: int = 0
    """Failed attempts that some worker had begun to compute, since decode last sent tokens: where workers die
    all the time, an answer that makes progress in between is not given up on."""
    unbegun: int = 0
    """Failed attempts that no worker had begun to compute, since decode last sent tokens: the request only
    waited in the queue of a worker that died."""
    deaths: int = 0
    """Deaths of workers that were computing the request, since it was last cleared."""
    to_pass: int = 0
    """Delivered tokens that clear the request."""
    watched: bool = False
    """Whether the request is a suspect, which runs only while no other suspect does."""

    def failed(self, *, computed: bool) -> None:
        """Count a failed attempt. ``computed``: a worker had begun to compute it."""
        self.failures += 1
        if computed:
            self.in_vain += 1
        else:
            self.unbegun += 1

    def fork(self) -> RetryState:
        """Return a copy for an answer that has parted from its group."""
        return replace(self)

    def got_to(self, num_tokens: int) -> bool:
        """Note the number of delivered tokens. True if that clears a request that had deaths."""
        if not self.deaths or num_tokens < self.to_pass:
            return False
        self.deaths, self.watched = 0, False
        return True


class Suspects:
    """The recent deaths, and the suspects that run now. Pure: no clock, no I/O."""

    def __init__(self) -> None:
        self._deaths: deque[tuple[float, frozenset[BlamedRequest]]] = deque(maxlen=MAX_DEATHS)
        """The time of each death, and the requests that were computed there."""
        self._running: set[RetryState] = set()
        """The suspects that run, all of one origin."""

    def died(self, present: Sequence[tuple[RetryState, int]], now: float) -> set[RetryState]:
        """Count a worker's death against ``present``: the requests that it computed, each with its number of
        delivered tokens. Returns the requests to give up on."""
        self._deaths.append((now, frozenset(retry_state.origin for retry_state, _ in present)))
        suspects: list[RetryState] = []
        for retry_state, num_tokens in present:
            retry_state.got_to(num_tokens)
            retry_state.deaths += 1
            retry_state.to_pass = num_tokens + PAST
            self.leave(retry_state)
            if retry_state.deaths >= SUSPECT_AFTER:
                suspects.append(retry_state)
        watched = {
            retry_state for retry_state in suspects if retry_state.watched
        }  # all of one origin: no other suspect ran
        if watched:
            guilty = watched
        else:
            origins = {retry_state.origin for retry_state in suspects}
            guilty = set(suspects) if len(origins) == 1 and self._in_all_deaths(origins, now) else set()
        for retry_state in suspects:
            retry_state.watched = retry_state not in guilty
        return guilty

    def _in_all_deaths(self, origins: set[BlamedRequest], now: float) -> bool:
        """Return whether ``origins`` were computed at every death of the last ``RECENT_S`` seconds."""
        return all(origins <= there for at, there in self._deaths if now - at < RECENT_S)

    def enter(self, retry_state: RetryState) -> bool:
        """Let a suspect run, if no other one does. Returns whether it may."""
        if any(other.origin is not retry_state.origin for other in self._running):
            return False
        self._running.add(retry_state)
        return True

    def leave(self, retry_state: RetryState) -> bool:
        """Note that a suspect has stopped, or is cleared. True if it ran: another one may now."""
        if retry_state not in self._running:
            return False
        self._running.remove(retry_state)
        return True
