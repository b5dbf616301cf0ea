"""When Python looks for cycles: at 2,000 streams a look at all objects takes 0.3 s, and every token waits.

Requests leave no cycles behind, connections a few. So the collector is told to leave what is old alone, and
all of it is looked at when nobody waits, or else every ten minutes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG = 50_000
"""Objects made and not freed since the last look at the young ones: some 1,000 new streams. Each stream that
waits for a token has a dozen, so Python's own 700 would have thousands looked at every moment."""
NEVER = 1_000_000
LOOK_S = 1.0
IDLE_S = 60.0
"""Between two full collections, where nothing is under way."""
BUSY_S = 600.0


async def collect(idle: Callable[[], bool]) -> None:
    """For as long as the router lives. ``idle``: whether no request is under way."""
    gc.collect()
    gc.freeze()  # what is there by now is no garbage
    gc.set_threshold(YOUNG, 10, NEVER)
    last = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        since = time.monotonic() - last
        if since >= BUSY_S or (since >= IDLE_S and idle()):
            gc.collect()
            last = time.monotonic()
