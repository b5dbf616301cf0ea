"""One reader, in order, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio

from baton.router.dispatch.mailbox import Mailbox


async def test_items_come_in_order_whether_they_wait_or_the_reader_does() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not reading.done()
    box.put(3)
    box.put(4)
    assert await reading == 3
    assert await box.get() == 4


async def test_a_reader_that_is_cancelled_takes_nothing_with_it() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)  # it has been woken, and has not run
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    async with asyncio.timeout(60):
        assert await box.get() == 1
