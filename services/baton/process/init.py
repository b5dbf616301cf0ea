"""A small init, for a container that starts ``baton`` without one.

The kernel drops a signal to process 1 that has no handler, so that SIGTERM would be lost during a start. Any
other process ends at once by the default action, even inside a library's long call. The images have tini as
process 1 (``docker/``), which also hears what comes before the interpreter runs.
"""

from __future__ import annotations

import os
import signal

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def leave_process_one() -> None:
    """Return at once unless this is process 1. If it is, return in a child process; process 1 stays behind,
    passes signals on to the child, reaps orphans, and ends with the child's status. Call it before anything
    else is imported."""
    if os.getpid() != 1:
        return
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status = None
    while status is None:
        told = signal.sigwaitinfo(awaited)
        if told.si_signo == signal.SIGCHLD:
            status = _reaped(child)
        elif told.si_code <= 0:  # what a terminal sends (SI_KERNEL), the child gets too
            os.kill(child, told.si_signo)
    os._exit(status)


def _reaped(child: int) -> int | None:
    """Wait for all processes that have ended. Returns the exit status of ``child`` as a shell reports it, or
    None while it runs."""
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if process == 0:
            return None
