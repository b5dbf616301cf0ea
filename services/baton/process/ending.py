"""The end of a process: in order, or forced when something hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from typing import NoReturn

from baton.process import stacks

log = logging.getLogger(__name__)

EXIT_HUNG = 71
"""The exit status of a process whose end hung. The log says on what."""
MAX_END_S = 5.0
"""The time that closing may take once no request is under way, or none may be any more, in seconds."""
TELL_S = 1.0
"""The time in which the log of what hangs must be written, in seconds: its writing may hang too."""


def end_process(status: int) -> NoReturn:
    """End the process once everything is closed. The interpreter is not finalized: threads of UCX, gloo and
    NCCL outlive their users, and a thread that still runs during finalization ends the process with a signal
    (SIGABRT seen with gloo, SIGSEGV with UCX)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def end_process_in_loop(status: int) -> NoReturn:
    """End the process from its event loop: first its other tasks, then what the loop's executor runs.

    The loop is not closed. Closing one under which gRPC ran has hung (seen once, on a busy core, in
    ``asyncio.Runner.close``): it kept the GIL, so that nothing could say on what it waited.
    """
    loop = asyncio.get_running_loop()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    for task, ended in zip(others, await asyncio.gather(*others, return_exceptions=True), strict=True):
        if isinstance(ended, Exception):
            log.error("the task %s failed at the end", task.get_name(), exc_info=ended)
    await loop.shutdown_default_executor()
    end_process(status)


def end_process_after(seconds: float, status: int = EXIT_HUNG) -> None:
    """End the process by force unless it has ended in order after ``seconds``. The stacks of all threads and
    of the running event loop's tasks are logged first."""
    timer = threading.Timer(seconds, _end_hung, (asyncio.get_running_loop(), seconds, status))
    timer.daemon = True
    timer.start()
    # A thread outside Python ends the process if a thread keeps the GIL and the timer cannot run.
    faulthandler.dump_traceback_later(seconds + 2 * TELL_S, exit=True, file=sys.__stderr__ or sys.stderr)


def _end_hung(loop: asyncio.AbstractEventLoop, seconds: float, status: int) -> None:
    telling = threading.Thread(target=_tell, args=(loop, seconds, status), daemon=True)
    telling.start()
    telling.join(TELL_S)
    os._exit(status)


def _tell(loop: asyncio.AbstractEventLoop, seconds: float, status: int) -> None:
    log.error("the end has taken longer than %g s: exit with status %d while this is open", seconds, status)
    ours = threading.get_ident()
    log.error("threads of a process that does not end:\n%s", stacks.of_threads(but=(ours,)))
    log.error("tasks of a process that does not end:\n%s", stacks.of_tasks(loop))
