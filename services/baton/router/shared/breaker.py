"""A circuit breaker for a service that has failed lately. Pure: the time is an argument."""

from __future__ import annotations

import random

TIMEOUTS = 3
"""The timeouts in a row that open the breaker. Any other failure opens it at once: a refusal does not pass by
itself."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


class Breaker:
    """A circuit breaker. Closed: call the service. Open: do not, but for a probe when ``may_try`` allows
    it."""

    def __init__(self) -> None:
        self.open = False
        self._timeouts = 0
        self._tries = 0
        self._next_try = 0.0

    def succeeded(self) -> None:
        self.open = False
        self._timeouts = self._tries = 0

    def failed(self, now: float, *, by_timeout: bool) -> bool:
        """Note a failure. Returns whether it opened the breaker."""
        self._timeouts += 1
        opens = not self.open and (not by_timeout or self._timeouts >= TIMEOUTS)
        self.open = self.open or opens
        if self.open:
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._tries, 10))
            self._tries += 1
            self._next_try = now + pause * random.uniform(0.5, 1)
        return opens

    def may_try(self, now: float) -> bool:
        return not self.open or now >= self._next_try
