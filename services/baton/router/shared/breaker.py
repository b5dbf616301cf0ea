"""Whether to ask a service that has failed lately. Pure: the time is given."""

from __future__ import annotations

import random

TIMEOUTS = 3
"""In a row, that open it. Anything else opens it at once: a refusal does not pass by itself."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Breaker:
    """Closed: ask. Open: do not, but for one try now and then by whoever looks after it."""

    def __init__(self) -> None:
        self.open = False
        self._timeouts = 0
        self._tries = 0
        self._next_try = 0.0

    def succeeded(self) -> None:
        self.open = False
        self._timeouts = self._tries = 0

    def failed(self, now: float, *, by_timeout: bool) -> bool:
        """Returns whether this opened it."""
        self._timeouts += 1
        opens = not self.open and (not by_timeout or self._timeouts >= TIMEOUTS)
        self.open = self.open or opens
        if self.open:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._tries, 10))
            self._tries += 1
            self._next_try = now + pause * random.uniform(0.5, 1)
        return opens

    def may_try(self, now: float) -> bool:
        return not self.open or now >= self._next_try
