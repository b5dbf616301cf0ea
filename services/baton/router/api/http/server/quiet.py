"""The requests by which an open page follows what goes on, which the audit log leaves out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from baton.router.security.client import Client

POLLED = frozenset({"/ui/data", "/debug/requests"})
"""The routes, as patterns, of which only what is refused is logged."""
FOLLOWED = frozenset({"/debug/requests/{request_id:path}"})
"""The routes of which a client's first look at a path is logged, and what is refused."""
FOLLOWS_S = 10.0
"""The time after a look within which the same client's next one follows it, in seconds."""
MAX_LOOKS = 1024
"""Most looks that are remembered, the latest."""


class Quiet:
    """Decides which requests have no line in the audit log. Event loop's thread only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looks: OrderedDict[tuple[str | None, str | None, str], float] = OrderedDict()
        """The time of the last look, by tenant, key and path."""

    def leaves_out(self, route: str, path: str, status: int, client: Client | None) -> bool:
        """Note a request for ``path`` at ``route`` that was answered, and return whether it is left out."""
        if not 200 <= status < 400:
            return False
        return route in POLLED or (route in FOLLOWED and self._follows(path, client))

    def _follows(self, path: str, client: Client | None) -> bool:
        look = (None, None, path) if client is None else (client.tenant.name, client.key, path)
        now = self._now()
        before = self._looks.pop(look, None)
        self._looks[look] = now
        if len(self._looks) > MAX_LOOKS:
            self._looks.popitem(last=False)
        return before is not None and now - before < FOLLOWS_S
