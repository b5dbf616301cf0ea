"""The end of a process: in order, or without waiting any longer for what hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from typing import NoReturn

from baton import stacks

log = logging.getLogger(__name__)

EXIT_HUNG = 71
"""Told to end, and something did not: the log says what."""
LONGEST_END_S = 5.0
"""For what is left when nothing is under way any more, or nothing may be."""
TELL_S = 1.0
"""For an account of what hangs to be written: what takes it may hang too."""


def end_process(status: int) -> NoReturn:
    """The end, once everything is closed. The interpreter is not taken down: threads of UCX, gloo and NCCL
    outlive what they served, and one of them that is still at work then ends the process with a signal
    (SIGABRT seen with gloo, SIGSEGV with UCX)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_process_after(seconds: float, status: int = EXIT_HUNG) -> None:
    """End without waiting for anyone, unless the process has ended in order by then. Where the tasks of the
    running event loop and all threads stand by then is logged first."""
    timer = threading.Timer(seconds, _end_hung, (asyncio.get_running_loop(), seconds, status))
    timer.daemon = True
    timer.start()
    # By a thread without Python, if not even the timer's gets to run: whoever has the interpreter keeps it.
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
