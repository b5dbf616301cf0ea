"""The schedule of Python's cycle collector: at 2,000 streams a full collection stops all tokens for 0.3 s.

Requests leave no cycles, connections a few. So the collector leaves old objects alone, and a full collection
runs while no request is under way, or when memory has grown so much that waiting could cost more.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

YOUNG = 50_000
"""The threshold of the youngest generation: net new objects since its last collection, some 1,000 new
streams. Each stream that waits for a token has a dozen, so Python's default of 700 would collect all the
time."""
NEVER = 1_000_000
LOOK_S = 1.0
IDLE_S = 60.0
"""The least time between two full collections while no request is under way, in seconds."""
BUSY_S = 30.0
"""The least time between two full collections while requests are under way and memory has grown, in
seconds."""
GROWN_BYTES = 256 << 20
"""The growth of memory since the last collection that is worth a pause of all streams. Counts of objects tell
little: one unreachable container may hold a body of 8 MiB."""


async def collect(idle: Callable[[], bool], memory: Callable[[], int] | None = None) -> None:
    """Run full collections for as long as the router lives. ``idle``: whether no request is under way.
    ``memory``: returns the bytes that the process has; None: ``resident_bytes``."""
    used = memory or resident_bytes
    gc.collect()
    gc.freeze()  # the objects that exist by now live for ever
    gc.set_threshold(YOUNG, 10, NEVER)
    last, before = time.monotonic(), used()
    while True:
        await asyncio.sleep(LOOK_S)
        since = time.monotonic() - last
        grown = since >= BUSY_S and used() - before >= GROWN_BYTES
        if grown or (since >= IDLE_S and idle()):
            gc.collect()
            last, before = time.monotonic(), used()


def resident_bytes() -> int:
    """Return the resident bytes of the process; 0 if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
