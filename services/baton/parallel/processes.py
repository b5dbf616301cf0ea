"""Processes of ranks on this node: their start, and how they ended, in words."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

PROGRAM = "baton.rank"
END_S = 1.0
"""The time for a rank to end, in seconds, after it was told to stop or its connection closed."""


def start_process(
    control: socket.socket, links: socket.socket, num_threads: int | None
) -> subprocess.Popen[bytes]:
    """Starts a rank that serves the leader at the other ends of both sockets, which are the rank's own from
    here on. ``num_threads``: threads on the CPU; thread pools are sized when a library is loaded."""
    environment: Mapping[str, str] = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    with control, links:
        descriptors = ("--control", str(control.fileno()), "--links", str(links.fileno()))
        # -P: a directory called torch in the working directory must not become our torch. The session of its
        # own keeps the terminal's Ctrl-C from the rank: the leader drains first. The rank's output must not
        # get into standard output, which is the leader's.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *descriptors],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **environment},
            pass_fds=[control.fileno(), links.fileno()],
            start_new_session=True,
        )


def how_it_ended(status: int) -> str:
    """The result of ``Popen.wait`` in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def end_process_within(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until the process is gone, and kills it after ``seconds``."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
