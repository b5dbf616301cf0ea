"""Tasks that are to run for as long as their process: an error that one does not expect is logged and
counted, and the task is started again.

A plain task that raises is over, and nobody hears of it. Whoever starts an endless task starts it here; a
task that belongs to one request, connection or stream does not, since it has somebody who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from baton.telemetry.tasks import TaskMetrics

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Before a task is started again, at most; drawn between half of it and all. It doubles with each failure,
and begins anew for a task that ran for longer than this."""


class Supervision:
    """The endless tasks of one process. Event loop's thread only."""

    def __init__(self, metrics: TaskMetrics | None = None) -> None:
        """``metrics``: None where nobody reads them."""
        self._metrics = metrics or TaskMetrics(CollectorRegistry())

    def start(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        *,
        of: str = "",
        on_failure: Callable[[], None] | None = None,
    ) -> asyncio.Task[None]:
        """A task that runs ``keep`` until it is cancelled."""
        named = f"{name} {of}" if of else name
        return asyncio.create_task(self.keep(name, run, of=of, on_failure=on_failure), name=named)

    async def keep(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        *,
        of: str = "",
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Run ``run`` until it returns, and again for as long as it raises.

        ``name`` is the metric's label, one of a few; ``of`` says in logs which of several it is.
        ``on_failure``: what to do in place of starting it again, where going on after an error is worse than
        ending.
        """
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                await run()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self.failed(name, error, of=of)  # of what ``run`` waited for: nobody wants this task to end
            except Exception as error:  # noqa: BLE001 - any: that is what this is for
                self.failed(name, error, of=of)
            else:
                return
            if on_failure is not None:
                on_failure()
                return
            if loop.time() - began > LONGEST_PAUSE_S:
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def failed(self, name: str, error: BaseException, *, of: str = "") -> None:
        """Log and count an error of a task that goes on by itself."""
        self._metrics.failures.labels(name).inc()
        log.error("%s met an error that it does not expect", f"{name} {of}" if of else name, exc_info=error)
