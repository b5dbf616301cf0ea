"""The driver that prefill and decode share: a pure state machine decides, and a role executes its actions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager

from baton.handoff.messages import Action, Name
from baton.handoff.timeline import Stage, Timeline

log = logging.getLogger(__name__)


class MachineDriver:
    """Executes the actions of one role's state machine, and follows the tasks begun for them to their end.

    A decision executed by half, or a transfer that nothing follows, would leave pages pinned for ever: an
    unexpected exception ends the worker. Event loop's thread only.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        execute: Callable[[Action], None],
        on_crash: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lock``: the engine's lock, held while the machine decides. ``clock``: the machine's time, in
        seconds. ``on_crash`` ends the worker."""
        self._lock = lock
        self._execute = execute
        self._on_crash = on_crash
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, step: Callable[[float], list[Action]]) -> None:
        """Call ``step`` with the machine's time, and execute its actions. Raises what either raises."""
        try:
            with self._lock:
                actions = step(self._clock())
            for action in actions:
                self._execute(action)
        except Exception:
            log.exception("a decision of the handoff could not be carried out; the worker cannot go on")
            self._on_crash()
            raise

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run ``work``, which must not fail, as a task."""
        self.follow(asyncio.create_task(work))

    def follow(self, task: asyncio.Task[None]) -> None:
        """Keep a task, which must not fail, until it has ended."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a transfer or a link could not be followed to its end", exc_info=task.exception())
            self._on_crash()


class Timelines(dict[Name, Timeline]):
    """The timelines of the handoffs that are under way on one side."""

    def reach(self, name: Name | None, stage: Stage | None, now: float | None = None) -> None:
        """Note a stage of a handoff, unless ``stage`` is None or the handoff is not under way. ``now``: the
        time of the stage, in seconds of ``time.monotonic``; None: this moment."""
        timeline = self.get(name) if name is not None else None
        if timeline is not None and stage is not None:
            timeline.reach(stage, time.monotonic() if now is None else now)

    def oldest(self, stage: Stage) -> float | None:
        """Return the earliest time at which a handoff here reached ``stage``; None if none has. Any
        thread."""
        reached = (timeline.reached(stage) for timeline in list(self.values()))
        return min((at for at in reached if at is not None), default=None)
