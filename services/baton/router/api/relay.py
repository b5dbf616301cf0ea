"""The relay of a stream to a client that may be slower than the stream, with a bound on what waits in
between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PIECE_BYTES = 64 * 1024
"""The most bytes that are written at once, unless a single item is larger."""


class SlowClientError(Exception):
    """A client that does not read what it has asked for."""


class Relay(Generic[T]):
    """Reads a stream as fast as it comes, and writes it as fast as the client takes it."""

    def __init__(self, size: Callable[[T], int], *, max_bytes: int, patience_s: float) -> None:
        """``size`` returns the size of an item, in bytes. At most ``max_bytes`` wait, and no write takes
        longer than ``patience_s`` seconds."""
        self._size = size
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._items: deque[T] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._errors: list[Exception] = []
        """The source's error, if it ended with one: raised after everything before it is written. It is
        popped before it is raised: a list that kept it would be kept by its traceback."""

    async def run(self, source: AsyncGenerator[T], write: Callable[[list[T]], Awaitable[None]]) -> None:
        """Run until the source has ended and everything is written. Raises SlowClientError if a bound is
        reached, and what the source or ``write`` raise. The caller closes the source."""
        # No task group: a frame of its own would keep the error that it ends with, and with it the whole
        # request, until the next collection of cycles.
        reading: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as writing:
                reading = asyncio.create_task(self._read(source, writing))
                await self._write_all(write)
        except TimeoutError:
            if not writing.expired():
                raise
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait((reading,))
        if self._errors:
            raise self._errors.pop()

    async def within_patience(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await writing
        except TimeoutError:
            raise SlowClientError(f"nothing was read for {self._patience_s:g} s") from None

    def add(self, item: T) -> None:
        self._items.append(item)
        self._bytes += self._size(item)
        self._changed.set()

    async def _read(self, source: AsyncGenerator[T], writing: asyncio.Timeout) -> None:
        """Read until the source has ended, or too much of it is unread, which ends the ``writing``."""
        try:
            async for item in source:
                self.add(item)
                if self._bytes - self._size(item) > self._max_bytes:  # a single item may be larger
                    self._errors.append(SlowClientError(f"{self._bytes} bytes are unread"))
                    writing.reschedule(0.0)
                    return
        except Exception as error:  # noqa: BLE001 - raised after everything before it is written
            self._errors.append(error)
        finally:
            self._ended = True
            self._changed.set()

    async def _write_all(self, write: Callable[[list[T]], Awaitable[None]]) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._items:
                await self.within_patience(write(self._piece()))
            if self._ended:
                return

    def _piece(self) -> list[T]:
        piece: list[T] = []
        size = 0
        while self._items and (not piece or size + self._size(self._items[0]) <= PIECE_BYTES):
            piece.append(self._items.popleft())
            size += self._size(piece[-1])
        self._bytes -= size
        return piece
