"""One child process: its start, what it says, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from baton.cli.console import View
from baton.process import ready
from baton.process.logs import LogReader

_LINE_LIMIT = 1024 * 1024
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child. ``env`` is added to our own environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds the cluster's key


class Child:
    """One run of a child process, from its start to its end."""

    def __init__(self, spec: ChildSpec, view: View) -> None:
        self.spec = spec
        self.ready: asyncio.Future[ready.Message] = asyncio.get_running_loop().create_future()
        self._view = view
        self._logs = LogReader()
        self._process: Process | None = None
        self._unwanted = False

    async def run(self) -> str:
        """Start the process and read what it says until it ends. Returns how it ended, in words."""
        started = time.monotonic()
        try:
            self._process = await self._start()
        except OSError as error:
            return f"{self.spec.argv[0]}: {error.strerror}"
        if self._unwanted:
            self.terminate()
        self._view.starting(self.spec.name)
        assert self._process.stdout and self._process.stderr
        readers = [
            asyncio.create_task(self._read_stdout(self._process.stdout, started)),
            asyncio.create_task(self._read_stderr(self._process.stderr)),
        ]
        code = await self._process.wait()
        await asyncio.wait(readers, timeout=_LAST_WORDS_SECONDS)
        for reader in readers:
            reader.cancel()
        return self._describe_end(code)

    async def _start(self) -> Process:
        # A session of its own: Ctrl-C in the terminal reaches only us, and we end the children in order.
        return await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LINE_LIMIT,
            env={**os.environ, **self.spec.env},
            start_new_session=True,
        )

    def _describe_end(self, code: int) -> str:
        if code < 0:
            try:
                return f"killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"killed by signal {-code}"
        return self._logs.last_error or f"exit status {code}"

    async def _read_stdout(self, stream: asyncio.StreamReader, started: float) -> None:
        async for line in _lines(stream):
            message = ready.parse(line)
            if message is None:
                self._view.log(self.spec.name, logging.INFO, line)
            elif isinstance(message, ready.ChosenSizes):
                self._view.say(f"{self.spec.name}: {message.text}")
            elif isinstance(message, ready.Progress):
                self._view.progress(self.spec.name, message)
            elif not self.ready.done():
                address = message.http if isinstance(message, ready.RouterReady) else message.address
                self._view.ready(self.spec.name, address, time.monotonic() - started)
                self.ready.set_result(message)

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            level = self._logs.read(line)
            # Services that end one after the other miss each other. That is no news.
            if not self._unwanted or level >= logging.ERROR:
                self._view.log(self.spec.name, level, line)

    def terminate(self) -> None:
        """Ask the process to end, also when it is only just being started."""
        self._unwanted = True
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process, and whatever it started."""
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the buffer: drop it, go on reading
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\r\n")
