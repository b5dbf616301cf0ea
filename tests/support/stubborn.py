"""Baton with a task that does not end when it is told to.

    python -m tests.support.stubborn task|thread router|worker-sim ...

``task`` takes no notice of its cancellation; ``thread`` is one that the event loop waits for at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import NoReturn

from baton.cli.main import app
from baton.router import main as router
from baton.worker.service import WorkerService


async def stubborn_task() -> NoReturn:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def waits_for_a_thread() -> None:
    await asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)


def main() -> None:
    _, what, *sys.argv[1:] = sys.argv
    hang = {"task": stubborn_task, "thread": waits_for_a_thread}[what]
    router.collect = lambda _: hang()  # type: ignore[assignment,attr-defined,misc]  # what main imports
    WorkerService.run_timers = lambda _: hang()  # type: ignore[assignment,method-assign]
    app()


if __name__ == "__main__":
    main()
