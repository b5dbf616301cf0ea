"""The pauses and the budget of retries: a lost worker costs a pause, an outage must not cost a retry storm.

- The first retry of a request is free: it takes up the load of the lost worker, and each request has at most
  one. It starts once other workers that were lost at the same moment are known to be lost.
- Every later retry waits for a random part of a time that doubles, and draws on a budget of the whole router:
  a share of the requests that come, and a small steady rate. A retry that finds the budget empty waits
  longer; the router gives up on a request that would wait longer than a client may wait for a worker.
- So workers see at most twice the requests there are, plus that share of them, whatever breaks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.router.dispatch.suspects import RetryState

UNBEGUN = 4
"""Attempts that may fail before a worker begins to compute them, for each further one that may fail after. A
request that waited in the queue of a worker that died is not the cause, but one that kills workers as they
read it must not be retried for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The limits of retries. Times are in seconds."""

    max_attempts: int = 5
    """Attempts of one request that may fail after a worker began to compute them, without a token from decode
    in between. With the last of them the router gives up on the request."""
    queue_timeout: float = 10.0
    """The longest time that an attempt waits for a worker, or for the budget; and the longest time that
    workers may refuse a request before the router gives up on it."""
    queue_size: int = 4096
    """Most requests that wait for a worker at the same time."""
    settle: float = 0.05
    """The time after a lost worker or a broken handoff until other losses of the same moment are known."""
    first_pause: float = 0.1
    """The longest pause before the second retry; it doubles with each further one, up to ``max_pause``."""
    max_pause: float = 2.0
    budget_share: float = 0.2
    """Retries that each new request adds to the budget."""
    budget_rate: float = 10.0
    """Retries that each second adds to the budget."""
    budget_most: float = 100.0
    """Most retries that the budget saves up."""


class RetryBudget:
    """A token bucket that may be overdrawn by a caller that waits until it is filled again."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._level = policy.budget_most
        self._filled_at = now

    def request_came(self) -> None:
        self._level = min(self._policy.budget_most, self._level + self._policy.budget_share)

    def draw(self, now: float) -> float | None:
        """Draw one retry. Returns the seconds to wait before it; None, with nothing drawn, if the wait would
        exceed ``queue_timeout``."""
        policy = self._policy
        self._level = min(policy.budget_most, self._level + policy.budget_rate * (now - self._filled_at))
        self._filled_at = now
        wait = max(0.0, (1.0 - self._level) / policy.budget_rate)
        if wait > policy.queue_timeout:
            return None
        self._level -= 1.0
        return wait


class Retries:
    """The retry policy of one router, and its budget."""

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
        """Count a request that is tried for the first time."""
        self._budget.request_came()

    def exhausted(self, retry_state: RetryState) -> bool:
        """Return whether a request has failed as often as it may without progress."""
        most = self.policy.max_attempts
        return retry_state.in_vain >= most or retry_state.unbegun >= 1 + UNBEGUN * (most - 1)

    def pause_after(self, failures: int, *, settle: bool = False) -> float | None:
        """Return the seconds until a request that has now failed ``failures`` times is tried again; None if
        the budget has no room. ``settle``: wait until other losses for the same reason are known."""
        least = self.policy.settle if settle else 0.0
        later = failures - 1
        if later <= 0:
            return least
        most = min(self.policy.max_pause, self.policy.first_pause * 2.0 ** (later - 1))
        wait = self._budget.draw(self._clock())
        return None if wait is None else max(least, wait + self._rng.uniform(0.0, most))
