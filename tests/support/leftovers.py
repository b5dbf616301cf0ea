"""What requests leave behind until somebody looks for cycles."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Awaitable, Callable

OURS = ("baton.", "uvicorn.", "starlette.", "fastapi.", "grpc._cython.cygrpc._ServicerContext")


async def leftovers(ask: Callable[[], Awaitable[None]], times: int = 3) -> Counter[str]:
    """What is in cycles after ``ask`` was called so often, with the collector off: objects, frames and
    coroutines of the server, by their kinds."""
    await ask()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(times):
            await ask()
        await asyncio.sleep(0.05)  # until connections and calls have ended at the server's side too
        gc.collect()
        return Counter(filter(None, map(_kind, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _kind(each: object) -> str | None:
    """What ``each`` is, if it is of the server."""
    name = f"{type(each).__module__}.{type(each).__qualname__}"
    if isinstance(each, types.FrameType):
        return f"frame of {each.f_code.co_qualname}" if "/baton/" in each.f_code.co_filename else None
    if isinstance(each, types.CoroutineType):
        return f"coroutine {each.__qualname__}"
    return name if name.startswith(OURS) else None
