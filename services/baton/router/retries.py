"""How soon a request is tried again: a lost worker costs a pause, an outage must not cost a storm.

- A request's first attempt beyond the one it came with is free: it takes up the load that a lost worker had,
  and there is one of it for each request at most. It is made as soon as others that went down at the same
  moment are known to have done so.
- Every later one waits, for a random part of a time that doubles, and draws on a budget of the whole router:
  a share of the requests that come, and a small steady rate. Where the budget is used up it waits longer, and
  is given up on rather than wait for longer than a client may wait for a worker.
- So workers see at most twice the requests there are, and that share of them, whatever breaks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.router.trail import Trail

UNBEGUN = 4
"""Attempts that may fail before they were begun, for each further one that may fail after: a request that
stood in line where workers died is not why, but one that kills them as they read it must not go round for
ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Times are in seconds."""

    max_attempts: int = 5
    """Of one request, that may fail once they were begun without a token from decode in between; it is given
    up on with the last of them."""
    queue_timeout: float = 10.0
    """The longest that an attempt waits to begin: for a worker, or for the budget; and the longest that a
    request is refused, by whichever workers, before it is given up on."""
    queue_size: int = 4096
    """Requests that may wait for a worker at the same time."""
    settle: float = 0.05
    """After a worker was lost or a handoff broke, until all that happened at the same moment is known."""
    first_pause: float = 0.1
    """The longest before the second attempt beyond the first; it doubles with each one more."""
    longest_pause: float = 2.0
    budget_share: float = 0.2
    """Of the requests that come."""
    budget_rate: float = 10.0
    """Per second, besides."""
    budget_most: float = 100.0
    """Saved up while nothing had to be tried again."""


class RetryBudget:
    """A token bucket that may be drawn on beyond what is there, by those who wait for it."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._level = policy.budget_most
        self._filled_at = now

    def request_came(self) -> None:
        self._level = min(self._policy.budget_most, self._level + self._policy.budget_share)

    def draw(self, now: float) -> float | None:
        """Seconds to wait before another attempt; None: it would be too long, and nothing is drawn."""
        policy = self._policy
        self._level = min(policy.budget_most, self._level + policy.budget_rate * (now - self._filled_at))
        self._filled_at = now
        wait = max(0.0, (1.0 - self._level) / policy.budget_rate)
        if wait > policy.queue_timeout:
            return None
        self._level -= 1.0
        return wait


class Retries:
    """One router's."""

    def __init__(
        self,
        policy: RetryPolicy,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._rng = rng or random.Random()
        self._clock = clock
        self._budget = RetryBudget(policy, clock())

    def request_came(self) -> None:
        """A request is tried for the first time."""
        self._budget.request_came()

    def exhausted(self, trail: Trail) -> bool:
        """Whether a request has failed as often as it may without getting on."""
        most = self.policy.max_attempts
        return trail.in_vain >= most or trail.unbegun >= 1 + UNBEGUN * (most - 1)

    def pause_after(self, failures: int, *, settle: bool = False) -> float | None:
        """Seconds until a request that has just failed for so many times is tried again; None: the budget
        has no room. ``settle``: others may have failed for the same reason, and it is not known yet."""
        least = self.policy.settle if settle else 0.0
        later = failures - 1
        if later <= 0:
            return least
        most = min(self.policy.longest_pause, self.policy.first_pause * 2.0 ** (later - 1))
        wait = self._budget.draw(self._clock())
        return None if wait is None else max(least, wait + self._rng.uniform(0.0, most))
