"""Keeps a set of child processes running, and ends them all."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cli.child import Child, ChildSpec
from baton.cli.console import View
from baton.process import ready
from baton.process.options import StartError


@dataclass(frozen=True, slots=True)
class Patience:
    """The policy of restarts: when to try again and when to give up. Times are in seconds."""

    deaths: int = 5  # of one child
    within: float = 60.0
    first_pause: float = 0.2  # before a restart; doubled for each recent death
    max_pause: float = 3.0
    grace: float = 5.0  # between asking a child to end and killing it

    def pause(self, recent_deaths: int) -> float:
        """How long to wait before the restart after so many recent deaths."""
        return min(self.first_pause * 2.0 ** (recent_deaths - 1), self.max_pause)


class Supervisor:
    """Starts children, restarts those that die, gives up by name. Always ``stop()`` it in the end."""

    def __init__(self, specs: Sequence[ChildSpec], view: View, patience: Patience | None = None) -> None:
        self._view = view
        self._patience = patience or Patience()
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._children: dict[str, Child] = {}
        loop = asyncio.get_running_loop()
        self._first_ready: Mapping[str, asyncio.Future[ready.Message]] = {
            spec.name: loop.create_future() for spec in specs
        }
        self._tasks = [loop.create_task(self._keep(spec), name=spec.name) for spec in specs]

    async def run(self) -> None:
        """Return when stopped. Raises StartError as soon as one child is beyond help."""
        # wait, not gather: being cancelled here must not cut the tasks off from their processes.
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def all_ready(self) -> dict[str, ready.Message]:
        """What each child said when it was ready for the first time."""
        return {name: await asyncio.shield(message) for name, message in self._first_ready.items()}

    async def stop(self) -> None:
        """End all children: ask, wait, kill. Returns when none is left."""
        self._stopping.set()
        for child in self._children.values():
            child.terminate()
        hurried = asyncio.create_task(self._hurried.wait())
        everyone = asyncio.create_task(asyncio.wait(self._tasks))
        await asyncio.wait(
            (hurried, everyone), timeout=self._patience.grace, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        for child in self._children.values():
            child.kill()
        await everyone

    def hurry(self) -> None:
        """Have ``stop()`` kill what has not ended yet."""
        self._hurried.set()

    async def _keep(self, spec: ChildSpec) -> None:
        deaths: deque[float] = deque()
        while not self._stopping.is_set():
            how = await self._run_once(spec)
            if self._stopping.is_set():
                return
            if not self._first_ready[spec.name].done():
                raise StartError(f"{spec.name} did not start: {how}")
            self._record_death(spec.name, how, deaths)
            self._view.warn(f"{spec.name} died ({how}); starting it again")
            await self._sleep(self._patience.pause(len(deaths)))

    def _record_death(self, name: str, how: str, deaths: deque[float]) -> None:
        now = time.monotonic()
        deaths.append(now)
        while deaths[0] < now - self._patience.within:
            deaths.popleft()
        if len(deaths) >= self._patience.deaths:
            within = f"{self._patience.within:.0f} s"
            raise StartError(f"{name} died {len(deaths)} times in {within}, the last time: {how}")

    async def _run_once(self, spec: ChildSpec) -> str:
        child = self._children[spec.name] = Child(spec, self._view)
        first = self._first_ready[spec.name]

        def remember(message: asyncio.Future[ready.Message]) -> None:
            if not first.done() and not message.cancelled():
                first.set_result(message.result())

        child.ready.add_done_callback(remember)
        return await child.run()

    async def _sleep(self, seconds: float) -> None:
        """Wait that long, or until everything is to stop."""
        waiting = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((waiting,), timeout=seconds)
        waiting.cancel()
