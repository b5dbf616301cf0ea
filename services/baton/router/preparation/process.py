"""One process that reads bodies, as its router sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from baton.router.api.prepared import Assignment
from baton.router.preparation.frames import LENGTH_BYTES, Said, frame, length_of
from baton.router.preparation.limits import MAX_ANSWER_BYTES

_BUFFER_BYTES = 1 << 20
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_SAID = msgspec.msgpack.Decoder(Said)


class DiedError(Exception):
    """The process has ended, or says what makes no sense. ``status``: as ``subprocess`` tells it."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"a process that reads bodies has ended with status {status}")
        self.status = status


class BodyProcess:
    """Answers one question at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setup: bytes) -> BodyProcess:
        """``setup``: the frame that comes first. What it takes to get ready is waited for by the first
        question."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.router.preparation.program",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_SINGLE_THREADED},
            limit=_BUFFER_BYTES,
        )
        assert process.stdin is not None
        process.stdin.write(setup)
        return cls(process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, assignment: Assignment, body: bytes) -> Said:
        """The answer to ``body``. Raises DiedError."""
        reader, writer = self._process.stdout, self._process.stdin
        assert reader is not None and writer is not None
        try:
            writer.write(frame(assignment) + length_of(body))
            writer.write(body)
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
            if size > MAX_ANSWER_BYTES:
                raise DiedError(None)
            return _SAID.decode(await reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            raise DiedError(await self._process.wait()) from None
        except msgspec.MsgspecError:
            raise DiedError(None) from None

    async def end(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
