"""A router whose event loop does one long turn at SIGUSR1.

    python -m tests.support.stalling_router sleep|work seconds watched|alone router ...

``sleep`` leaves the interpreter to other threads, ``work`` is Python code that gives them no more than it
must. ``alone``: nobody watches the loop.
"""

from __future__ import annotations

import signal
import sys
import time

from baton.cli.main import app
from baton.router.pulse.watch import LoopWatch


def work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100))


def main() -> None:
    _, how, seconds, who, *sys.argv[1:] = sys.argv
    turn = {"sleep": time.sleep, "work": work}[how]
    if who == "alone":
        LoopWatch.start = lambda self: None  # type: ignore[method-assign]
    # Python's handlers run in the main thread, between two steps of whatever it does: here, the event loop.
    signal.signal(signal.SIGUSR1, lambda *_: turn(float(seconds)))
    app()


if __name__ == "__main__":
    main()
