"""One process that reads bodies, as its router sees it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import msgspec

from baton.router.api.prepared import Assignment
from baton.router.preparation.frames import LENGTH_BYTES, Said, frame, length_of
from baton.router.preparation.limits import MAX_ANSWER_BYTES

_BUFFER_BYTES = 1 << 20
_ENDS_S = 10.0
"""How long a process that has closed its end may take to be gone, on a machine that is busy."""
_LOOK_S = 0.01
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
"""What a large body took is the system's again after it. By itself, malloc learns to keep more and more."""
_SAID = msgspec.msgpack.Decoder(Said)


class DiedError(Exception):
    """The process has ended, or says what makes no sense. ``status``: as ``subprocess`` tells it."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"a process that reads bodies has ended with status {status}")
        self.status = status


class BodyProcess:
    """Answers one question at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: bytes) -> BodyProcess:
        """``setup``: the frame that comes first. What it takes to get ready is waited for by the first
        question. Raises OSError."""
        ours, its = socket.socketpair()
        with its:
            # Not by the event loop: it forks, and gRPC would have its threads stop for that. This does not.
            process = subprocess.Popen(  # noqa: ASYNC220 - until the program has begun, which is a moment
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

    async def ask(self, assignment: Assignment, body: bytes) -> Said:
        """The answer to ``body``. Raises DiedError."""
        try:
            self._writer.write(frame(assignment) + length_of(body))
            self._writer.write(body)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
            if size > MAX_ANSWER_BYTES:
                raise DiedError(None)
            return _SAID.decode(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            raise DiedError(await self._ended()) from None
        except msgspec.MsgspecError:
            raise DiedError(None) from None

    async def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._writer.close()
        await self._ended()

    async def _ended(self) -> int | None:
        """The status of a process that ends now; None: it did not in time."""
        for _ in range(round(_ENDS_S / _LOOK_S)):
            if (status := self._process.poll()) is not None:
                return status
            await asyncio.sleep(_LOOK_S)
        return None
