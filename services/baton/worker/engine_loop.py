"""The engine's thread: it runs step after step while there is work, and sleeps otherwise."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

from baton.engine.engine import Engine, SequenceOutput
from baton.engine.sequence import Sequence

log = logging.getLogger(__name__)

RECHECK_S = 0.05
"""Most seconds of delay of a sequence that waits for blocks which come free without a wake."""


class EngineLoop:
    """Runs ``engine.step`` on a thread and posts the outputs to the event loop.

    Neither thread waits for the other: the engine runs the next step while outputs are published. An
    exception in a step leaves the pool's content unknown, so it ends the worker (``on_crash``).
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[SequenceOutput]], None],
        on_crash: Callable[[], None],
        on_start: Callable[[list[Sequence]], None] = lambda _: None,
    ) -> None:
        """``on_start`` is called with sequences before they are computed for the first time."""
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._settling: deque[asyncio.Event] = deque()
        engine.on_start = lambda started: self._post(on_start, started)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _post(self, on_start: Callable[[list[Sequence]], None], started: list[Sequence]) -> None:
        self._loop.call_soon_threadsafe(on_start, started)

    def start(self) -> None:
        self._engine.runner.leave()  # this thread, which loaded the model, computes no more
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step that is running, and wait for the thread."""
        self._stopping = True
        self._engine.work.set()
        self._thread.join()

    async def settled(self) -> None:
        """Return when all that was computed before this call has been published."""
        settled = asyncio.Event()
        self._settling.append(settled)
        self._engine.work.set()
        await settled.wait()

    def _settle(self, count: int) -> None:
        """Tell the first ``count`` who wait for it that their outputs have been published."""
        for _ in range(count):
            self._loop.call_soon_threadsafe(self._settling.popleft().set)

    def _run(self) -> None:
        self._engine.runner.enter()
        try:
            while not self._stopping:
                self._engine.work.clear()
                if not self._engine.computing:
                    self._settle(len(self._settling))
                num_settling = len(self._settling)  # what these ask for is over with the step under way
                outputs, waits = [], True
                if self._engine.has_work:
                    outputs = self._engine.step()
                    waits = self._engine.stalled
                if outputs:
                    self._loop.call_soon_threadsafe(self._on_outputs, outputs)
                self._settle(num_settling)
                if waits and not outputs:  # no sequences, or all wait for blocks that a handoff holds
                    self._engine.work.wait(RECHECK_S)
        except Exception:
            log.exception("a step failed; the worker cannot go on")
            self._loop.call_soon_threadsafe(self._on_crash)
