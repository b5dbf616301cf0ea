"""The processes that read bodies, as one router has them: some are ready before a body comes, others are
started for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from baton.router.preparation.limits import IDLE_S, START_AGAIN_S, START_S
from baton.router.preparation.process import BodyProcess, DiedError

log = logging.getLogger(__name__)


class Processes(Protocol):
    """Processes of one kind. Event loop's thread only."""

    @property
    def count(self) -> int:
        """The number of processes that read a body or could."""

    def grow(self) -> None:
        """Start another process, as a body has waited for one."""

    async def take(self) -> BodyProcess:
        """Return a process that reads nothing. Raises OSError."""

    def give(self, process: BodyProcess, *, ends: bool) -> None:
        """Take back what `take` returned. ``ends``: whether the process answers nothing more."""

    async def close(self) -> None:
        """End all processes, whatever they read."""


class _Kept:
    """What both kinds do: they keep idle processes for a while, and one of them or more for ever."""

    def __init__(self, setup: bytes, stay: int) -> None:
        self._setup = setup
        self._stay = stay
        self._idle: list[BodyProcess] = []
        self._busy: set[BodyProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._idle) + len(self._busy)

    def _pop(self) -> BodyProcess | None:
        """Return an idle process; None if there is none."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                self._busy.add(process)
                return process
        return None

    def give(self, process: BodyProcess, *, ends: bool) -> None:
        self._busy.discard(process)
        if ends:
            self._end(process)
        else:
            self._idle.append(process)
            self._clean_later()

    async def close(self) -> None:
        self._closed = True
        if self._cleaning is not None:
            self._cleaning.cancel()
        processes = [*self._idle, *self._busy]
        self._idle.clear()
        await asyncio.gather(*(process.end() for process in processes))
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, process: BodyProcess) -> None:
        ending = asyncio.create_task(process.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _clean_later(self) -> None:
        if self._cleaning is None and len(self._idle) > self._stay:
            self._cleaning = asyncio.get_running_loop().call_later(IDLE_S, self._clean)

    def _clean(self) -> None:
        """End an idle process if enough others are."""
        self._cleaning = None
        if len(self._idle) > self._stay:
            self._end(self._idle.pop(0))
        self._clean_later()


class StartedProcesses(_Kept):
    """Processes that are started for a body when none is idle. One of them stays."""

    def __init__(self, setup: bytes) -> None:
        super().__init__(setup, stay=1)

    async def start_first(self) -> None:
        """Start a process for the first body, which would otherwise wait a third of a second for it."""
        try:
            self._idle.append(await BodyProcess.start(self._setup))
        except OSError as error:
            log.error("no process to read bodies can be started yet: %s", error)

    def grow(self) -> None:
        """Do nothing: a body that has a seat has its process started."""

    async def take(self) -> BodyProcess:
        if (process := self._pop()) is None:
            process = await BodyProcess.start(self._setup)
            self._busy.add(process)
        return process


class ReadyProcesses(_Kept):
    """Processes that have loaded what they need before they take a body. A body waits for the next one that
    is free, not for a new one: further ones are started beside it."""

    def __init__(self, setup: bytes, *, stay: int, most: int, changed: Callable[[], None]) -> None:
        """``stay``: how many are kept; ``most``: how many there may be; ``changed`` is called when one more
        is there."""
        super().__init__(setup, stay)
        self._most = most
        self._changed = changed
        self._starting: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()

    def fill(self) -> None:
        """Start the processes that stay, as far as they are not there."""
        while not self._closed and self.count + len(self._starting) < self._stay:
            self._start()

    def grow(self) -> None:
        if not self._closed and not self._starting and self.count < self._most:
            self._start()

    async def take(self) -> BodyProcess:
        while (process := self._pop()) is None:
            self.grow()
            self._came.clear()
            await self._came.wait()
        return process

    def give(self, process: BodyProcess, *, ends: bool) -> None:
        super().give(process, ends=ends)
        if ends:
            self.fill()
        self._came.set()

    async def close(self) -> None:
        self._closed = True
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await super().close()

    def _start(self) -> None:
        starting = asyncio.create_task(self._started())
        self._starting.add(starting)
        starting.add_done_callback(self._over)

    def _over(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        self._came.set()

    async def _started(self) -> None:
        """Start a process and put it among the idle ones when it can answer."""
        process: BodyProcess | None = None
        try:
            process = await BodyProcess.start(self._setup)
            async with asyncio.timeout(START_S):
                await process.ready()
        except (OSError, DiedError, TimeoutError) as error:
            if process is not None:
                self._end(process)
            log.error("no process to read small bodies can be started: %s", error)
            await asyncio.sleep(START_AGAIN_S)
            return
        except BaseException:
            if process is not None:
                await process.end()
            raise
        self._idle.append(process)
        self._clean_later()
        self._changed()
