"""The reading of calls' messages: a few at a time, and each within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from baton.router.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Bounds on reading messages. A message may be as long as the server allows, and is in memory until it is
    parsed."""

    readers: int = 16
    """The most messages under way in all."""
    tenant_readers: int = 4
    """The most messages under way of one tenant."""
    message_s: float = 20.0
    """The time within which a message must be whole, in seconds."""
    undisturbed_s: float = 1.0
    """The time that a message may take while others wait to be read, in seconds."""


@dataclass(slots=True, eq=False)
class _Reading:
    tenant: str
    since: float
    timeout: asyncio.Timeout
    displaced: bool = False


class MessageRoom:
    """Limits the messages that are under way. One that waits for room ends the oldest one that has had its
    time: a slow sender has room for as long as no other message needs it. Event loop's thread only."""

    def __init__(self, limits: MessageLimits | None = None) -> None:
        self._limits = limits or MessageLimits()
        self._readings: list[_Reading] = []
        self._left = asyncio.Event()

    @property
    def under_way(self) -> int:
        """The number of messages that are being read."""
        return len(self._readings)

    async def read(self, messages: AsyncIterator[bytes], tenant: str) -> bytes | None:
        """Return the first of ``messages``, from a call of ``tenant``; None if the call ended without any.
        Raises ApiError: 408 for a message that takes too long, 429 for one that took long while others
        waited."""
        limits = self._limits
        reading: _Reading | None = None
        try:
            async with asyncio.timeout(limits.message_s) as timeout:
                await self._room_for(tenant)
                with self._reading(tenant, timeout) as reading:
                    return await anext(messages, None)
        except TimeoutError:
            pass
        if reading is not None and reading.displaced:
            raise ApiError(
                429,
                f"The message was not whole after {limits.undisturbed_s:g} s, and others waited to be read.",
                code="message_too_slow",
            )
        raise ApiError(
            408, f"The message was not whole within {limits.message_s:g} s.", code="message_too_slow"
        )

    @contextmanager
    def _reading(self, tenant: str, timeout: asyncio.Timeout) -> Iterator[_Reading]:
        reading = _Reading(tenant, asyncio.get_running_loop().time(), timeout)
        self._readings.append(reading)
        try:
            yield reading
        finally:
            self._readings.remove(reading)
            self._left.set()

    async def _room_for(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        while rivals := self._rivals(tenant):
            oldest = rivals[0]
            left = oldest.since + self._limits.undisturbed_s - loop.time()
            if left <= 0:
                oldest.displaced = True
                oldest.timeout.reschedule(loop.time())
                left = self._limits.undisturbed_s  # the oldest is about to leave
            self._left.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._left.wait()

    def _rivals(self, tenant: str) -> list[_Reading]:
        """Return the messages whose room a message of ``tenant`` needs, the oldest first; none if there is
        room."""
        own = [reading for reading in self._readings if reading.tenant == tenant]
        if len(own) >= self._limits.tenant_readers:
            return own
        return self._readings if len(self._readings) >= self._limits.readers else []
