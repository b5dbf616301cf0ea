"""Room for calls of gRPC's health service, which need no key.

A probe that sends its message finds an answer however many strangers probe: what strangers take up makes room
for newcomers, from the address with the most of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.net.addresses import counted_peer
from baton.router.api.errors import ApiError

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
PROBES = frozenset({CHECK, WATCH})
"""The methods for probes."""


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Bounds on the calls of probes."""

    readers: int = 32
    """The most messages of probes under way."""
    message_s: float = 5.0
    """The time within which a probe's message must be whole, in seconds: it has a few bytes."""
    watches: int = 256
    """The most calls of Watch that are open."""
    address_watches: int = 16
    """The most calls of Watch from one address."""
    watch_s: float = 600.0
    """The longest time of a call of Watch, in seconds. A client that watches the health then asks again, as
    gRPC's clients do."""


@dataclass(slots=True, eq=False)
class _Place:
    address: str
    timeout: asyncio.Timeout
    displaced: bool = False


class _Places:
    """Places of which a newcomer always gets one. If there is none left, the oldest place of the address with
    the most is taken away: its call ends."""

    def __init__(self, most: int, of_address: int) -> None:
        self._most = most
        self._of_address = of_address
        self._by_address: dict[str, list[_Place]] = {}
        self.taken = 0

    @contextmanager
    def one(self, address: str, timeout: asyncio.Timeout) -> Iterator[_Place]:
        """Hold a place while the context lasts. Whose place is taken away, its ``timeout`` ends at once."""
        own = self._by_address.setdefault(address, [])
        if len(own) >= self._of_address:
            self._displace(own)
        elif self.taken >= self._most:
            self._displace(max(self._by_address.values(), key=len))
        place = _Place(address, timeout)
        self._by_address.setdefault(address, []).append(place)
        self.taken += 1
        try:
            yield place
        finally:
            if not place.displaced:
                self._remove(place)

    def _displace(self, places: list[_Place]) -> None:
        oldest = places[0]
        oldest.displaced = True
        self._remove(oldest)
        oldest.timeout.reschedule(asyncio.get_running_loop().time())

    def _remove(self, place: _Place) -> None:
        places = self._by_address[place.address]
        places.remove(place)
        self.taken -= 1
        if not places:
            del self._by_address[place.address]


class ProbeRoom:
    """Bounds the calls of probes. Event loop's thread only."""

    def __init__(self, limits: ProbeLimits | None = None) -> None:
        self._limits = limits or ProbeLimits()
        self._readings = _Places(self._limits.readers, self._limits.readers)
        self._watches = _Places(self._limits.watches, self._limits.address_watches)

    @property
    def watching(self) -> int:
        """The number of open calls of Watch."""
        return self._watches.taken

    async def read(self, messages: AsyncIterator[bytes], peer: str) -> bytes | None:
        """Return the first of ``messages``, from a call of ``peer``, as gRPC names it; None if the call ended
        without any. Raises ApiError for a message that takes too long, or makes room for another."""
        place: _Place | None = None
        try:
            async with asyncio.timeout(self._limits.message_s) as timeout:
                with self._readings.one(counted_peer(peer), timeout) as place:
                    return await anext(messages, None)
        except TimeoutError:
            pass
        if place is not None and place.displaced:
            raise ApiError(429, "Other probes needed the room.", code="message_too_slow")
        raise ApiError(
            408, f"The message was not whole within {self._limits.message_s:g} s.", code="message_too_slow"
        )

    @contextmanager
    def watch(self, peer: str, timeout: asyncio.Timeout) -> Iterator[None]:
        """Hold a place of a Watch from ``peer``, whose ``timeout`` ends at once if others need its place."""
        timeout.reschedule(asyncio.get_running_loop().time() + self._limits.watch_s)
        with self._watches.one(counted_peer(peer), timeout):
            yield
