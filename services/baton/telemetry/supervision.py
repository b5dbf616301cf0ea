"""Tasks that run for as long as their process: an unexpected error is logged and counted, and the task is
started again.

A plain task that raises is over, and nothing reports it. An endless task is started here; a task that belongs
to one request, connection or stream is not, since its owner awaits it.
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
MAX_PAUSE_S = 2.0
"""The longest pause before a task is started again, in seconds; the pause is drawn between half of its
bound and all of it. The bound doubles with each failure, and begins anew for a task that ran for longer
than this."""


class Supervision:
    """The endless tasks of one process. Event loop's thread only."""

    def __init__(self, metrics: TaskMetrics | None = None) -> None:
        """``metrics``: None if nothing reads them."""
        self._metrics = metrics or TaskMetrics(CollectorRegistry())

    def start(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        *,
        of: str = "",
        on_failure: Callable[[], None] | None = None,
    ) -> asyncio.Task[None]:
        """Start a task that runs ``keep`` until it is cancelled."""
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
        """Run ``run`` until it returns, and again whenever it raises.

        ``name`` is the metric's label, one of a few; ``of`` distinguishes tasks of one name in logs.
        ``on_failure`` is called in place of a restart, where going on after an error is worse than ending.
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
                self.failed(name, error, of=of)  # raised by what ``run`` awaited: this task goes on
            except Exception as error:  # noqa: BLE001 - any: that is the purpose
                self.failed(name, error, of=of)
            else:
                return
            if on_failure is not None:
                on_failure()
                return
            if loop.time() - began > MAX_PAUSE_S:
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, MAX_PAUSE_S)

    def failed(self, name: str, error: BaseException, *, of: str = "") -> None:
        """Log and count an error of a task that goes on by itself."""
        self._metrics.failures.labels(name).inc()
        log.error("%s met an error that it does not expect", f"{name} {of}" if of else name, exc_info=error)
