"""Several choices at once, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from baton.text.choice import Delta

_QUEUED_PER_CHOICE = 2
"""How far choices run ahead of a slow client, on top of what the ring itself buffers."""


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None


async def merge(choices: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[tuple[int, Delta]]:
    """Run ``choices`` concurrently; each delta comes with its choice's index.

    The first choice to fail ends all of them with its error. Closing the generator closes them all, and does
    not return before they are closed.
    """
    if len(choices) == 1:  # the common case needs no tasks and no queue
        async with aclosing(choices[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | _Ended] = asyncio.Queue(_QUEUED_PER_CHOICE * len(choices))
    tasks = [asyncio.create_task(_pump(index, choice, queue)) for index, choice in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, choice: AsyncGenerator[Delta], queue: asyncio.Queue[tuple[int, Delta] | _Ended]
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(choice) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as caught:  # noqa: BLE001 - raised again by `merge`, in its consumer
        error = caught
    await queue.put(_Ended(error))
