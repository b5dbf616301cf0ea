"""When Python looks for cycles: at 2,000 streams a look at all objects takes 0.3 s, and every token waits.

Requests leave no cycles behind, connections a few. So the collector is told to leave what is old alone, and
all of it is looked at when nobody waits, or when memory has grown by so much that waiting could cost more.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

YOUNG = 50_000
"""Objects made and not freed since the last look at the young ones: some 1,000 new streams. Each stream that
waits for a token has a dozen, so Python's own 700 would have thousands looked at every moment."""
NEVER = 1_000_000
LOOK_S = 1.0
IDLE_S = 60.0
"""Between two full collections, where nothing is under way."""
BUSY_S = 30.0
"""Between two, where something is, and memory has grown."""
GROWN_BYTES = 256 << 20
"""How much more memory than after the last collection is worth a pause of all streams. Containers alone tell
little: one that nobody refers to may hold a body of 8 MiB."""


async def collect(idle: Callable[[], bool], memory: Callable[[], int] | None = None) -> None:
    """For as long as the router lives. ``idle``: whether no request is under way. ``memory``: bytes that the
    process has."""
    used = memory or resident_bytes
    gc.collect()
    gc.freeze()  # what is there by now is no garbage
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
    """What the process has in memory; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
