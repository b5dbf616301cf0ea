"""A machine that has other work: busy processes beside a measurement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAX_S = 3600.0
"""The time after which a busy process ends by itself, in seconds, should nobody end it."""

_BUSY = """
import select, sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until and not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(200_000):
        pass
"""


@contextmanager
def busy(count: int, max_s: float = MAX_S) -> Iterator[None]:
    """Have ``count`` processes keep a core busy each, with the usual niceness, for as long as the context
    lasts: at most ``max_s`` seconds. They also end with the process that started them, which holds the other
    end of their standard input."""
    processes = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(max_s)], stdin=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
