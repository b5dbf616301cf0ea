"""Several choices at once, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from baton.text.choice import Delta

_QUEUED_PER_CHOICE = 2
"""How far choices run ahead of a slow client, on top of what the ring itself buffers."""


Choice = AsyncGenerator[tuple[int, Delta]]


@dataclass(frozen=True, slots=True)
class _Ended:
    errors: list[Exception]
    """One, or none. Whoever raises it takes it out: what kept it would be kept by its traceback."""


def merge(choices: Sequence[Choice]) -> Choice:
    """Run ``choices``, whose deltas come with their choice's index, concurrently.

    The first choice to fail ends all of them with its error. Closing the generator closes them all, and does
    not return before they are closed.
    """
    return choices[0] if len(choices) == 1 else _merged(choices)


async def _merged(choices: Sequence[Choice]) -> Choice:
    queue: asyncio.Queue[tuple[int, Delta] | _Ended] = asyncio.Queue(_QUEUED_PER_CHOICE * len(choices))
    tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.errors:
                raise item.errors.pop()
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[int, Delta] | _Ended]) -> None:
    errors: list[Exception] = []
    try:
        async with aclosing(choice) as deltas:
            async for delta in deltas:
                await queue.put(delta)
    except Exception as caught:  # noqa: BLE001 - raised again by `merge`, in its consumer
        errors.append(caught)
    await queue.put(_Ended(errors))
