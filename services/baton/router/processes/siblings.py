"""Questions between the processes of one router, over Unix sockets. A question is a name and some bytes, an
answer is bytes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from baton.router.processes.slot import ProcessSlot

log = logging.getLogger(__name__)

ASK_S = 1.0
"""The time in which a process must answer, in seconds. Others are left out: a page must not wait for a
process that hangs."""
MAX_QUESTION = 64 << 10
MAX_ANSWER = 64 << 20
_LENGTH = 4

Answer: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Returns the answer to a question's bytes."""


class Siblings:
    """The other processes of this router. Event loop's thread only."""

    def __init__(self, place: ProcessSlot | None = None) -> None:
        """``place``: None if the router has one process."""
        self.index = 0 if place is None else place.index
        self._place = place
        self._answers: dict[str, Answer] = {}

    @property
    def several(self) -> bool:
        """Whether the router has other processes."""
        return self._place is not None

    def on(self, question: str, answer: Answer) -> None:
        """Register the answer of this process to a question."""
        self._answers[question] = answer

    async def ask(self, question: str, about: bytes = b"") -> dict[int, bytes]:
        """Return the answers of the other processes by their index. A process that does not answer within
        ``ASK_S`` is left out."""
        if self._place is None:
            return {}
        others = [index for index in range(self._place.count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, question, about) for index in others))
        return {index: said for index, said in zip(others, answers, strict=True) if said is not None}

    @property
    def others(self) -> int:
        """The number of other processes."""
        return 0 if self._place is None else self._place.count - 1

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer other processes while the context lasts."""
        if self._place is None:
            yield
            return
        path = self._socket(self._place, self.index)
        path.unlink(missing_ok=True)  # left by the process that had this slot before
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()

    @staticmethod
    def _socket(place: ProcessSlot, index: int) -> Path:
        return place.directory / str(index)

    async def _ask(self, index: int, question: str, about: bytes) -> bytes | None:
        assert self._place is not None
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(self._place, index))
                with contextlib.closing(writer):
                    _write(writer, question.encode() + b"\n" + about)
                    return await _read(reader, MAX_ANSWER)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            log.info("process %d of this router does not say its %s: %r", index, question, error)
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(ASK_S):
                    question, _, about = (await _read(reader, MAX_QUESTION)).partition(b"\n")
                    _write(writer, await self._answers[question.decode()](about))
                    await writer.drain()
            except (OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
                log.warning("another process of this router is not answered: %r", error)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(_LENGTH, "big") + message)


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    """Read a message. Raises ValueError for a message of more than ``most`` bytes, EOFError at the end of the
    stream."""
    length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes, of at most {most}")
    return await reader.readexactly(length)
