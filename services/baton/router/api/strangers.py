"""The tally of requests that are refused before it is known who asks, for the audit log: whoever makes them
chooses how many there are, and must not choose how long the log is."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ADDRESSES = 16
"""The most addresses that have an entry of their own in one tally; all others share one."""


@dataclass(slots=True)
class StrangersRequests:
    """The requests from one address since the last line about it."""

    request_id: str
    """The first one's."""
    endpoint: str
    status: int
    count: int = 1


class StrangersTally:
    """Counts requests by address. Event loop's thread only."""

    def __init__(self) -> None:
        self._by_address: dict[str | None, StrangersRequests] = {}

    def add(self, address: str | None, request_id: str, endpoint: str, status: int) -> None:
        """Count a request from ``address``, as bounds count it; None if it is unknown."""
        if address not in self._by_address and len(self._by_address) >= MAX_ADDRESSES:
            address = None
        entry = self._by_address.get(address)
        if entry is None:
            self._by_address[address] = StrangersRequests(request_id, endpoint, status)
        else:
            entry.count += 1

    def take(self) -> dict[str | None, StrangersRequests]:
        """Return the requests by address, None for all addresses that have no entry, and begin anew."""
        taken, self._by_address = self._by_address, {}
        return taken
