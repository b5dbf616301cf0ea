"""One process that reads bodies, seen from its router."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import msgspec

from baton.router.preparation.frames import LENGTH_BYTES, Question, Said, frame, length_of
from baton.router.preparation.limits import MAX_ANSWER_BYTES, QUICK_BYTES

_BUFFER_BYTES = 1 << 20
_ENDS_S = 10.0
"""The time that a killed process may take to be gone on a busy machine, in seconds."""
_LOOK_S = 0.01
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
"""Settings of malloc by which the memory of a large body returns to the system. By default malloc adapts its
thresholds and keeps more and more."""
_SAID = msgspec.msgpack.Decoder(Said)


class DiedError(Exception):
    """A process that has ended, or that sends what makes no sense. ``status``: as ``subprocess`` gives it, or
    None."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"a process that reads bodies has ended with status {status}")
        self.status = status


class BodyProcess:
    """A process that reads one body at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ready = False

    @classmethod
    async def start(cls, setup: bytes) -> BodyProcess:
        """Start a process and send it ``setup``, its first frame. Raises OSError."""
        ours, its = socket.socketpair()
        with its:
            # Not started by the event loop, which forks, and gRPC would stop its threads for that. Popen does
            # not fork.
            process = subprocess.Popen(  # noqa: ASYNC220 - blocks for a moment: until the program has begun
                [sys.executable, "-m", "baton.router.preparation.program", str(os.getpid())],
                stdin=its.fileno(),
                stdout=its.fileno(),
                env={**os.environ, **_SINGLE_THREADED, **_GIVES_BACK},
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
        writer.write(setup)
        return cls(process, reader, writer)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Wait until the process can answer. Raises DiedError."""
        if not self._ready:
            await self._frame()
            self._ready = True

    async def ask(self, question: Question, body: bytes) -> Said:
        """Return the answer to ``question`` about ``body``. Raises DiedError."""
        await self.ready()
        try:
            before = frame(question) + length_of(body)
            # Together, so that the process wakes up once; a large body is not copied for that.
            self._writer.writelines((before + body,) if len(body) <= QUICK_BYTES else (before, body))
            await self._writer.drain()
        except OSError:
            raise DiedError(await self._ended()) from None
        try:
            return _SAID.decode(await self._frame())
        except msgspec.MsgspecError:
            raise DiedError(None) from None

    async def _frame(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
            if size > MAX_ANSWER_BYTES:
                raise DiedError(None)
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            raise DiedError(await self._ended()) from None

    async def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._writer.close()
        await self._ended()

    async def _ended(self) -> int | None:
        """Return the exit status of a process that is ending; None if it does not end in time."""
        for _ in range(round(_ENDS_S / _LOOK_S)):
            if (status := self._process.poll()) is not None:
                return status
            await asyncio.sleep(_LOOK_S)
        return None
