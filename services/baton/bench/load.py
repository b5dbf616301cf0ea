"""Offers requests to a server: at given times, or a number of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from baton.bench.exchange import Exchange, Prepared
from baton.bench.record import Record

T = TypeVar("T")


async def open_loop(
    exchange: Exchange, requests: Sequence[Prepared], times: Sequence[float], until: float | None = None
) -> list[Record]:
    """Send each request at its time, in seconds of the exchange's clock, whatever became of those before.

    The times are kept: a client that is late sends at once and does not shift what comes after. What has not
    ended at ``until`` is given up.
    """
    tasks: list[asyncio.Task[Record]] = []
    for index, (request, due) in enumerate(zip(requests, times, strict=True)):
        # Also when late, so that many requests at one time do not hold up the answers to the first of them.
        await asyncio.sleep(max(0.0, due - exchange.now()))
        tasks.append(asyncio.create_task(exchange.send(index, request, due)))
    return await _all(tasks, exchange, until)


async def closed_loop(
    exchange: Exchange, requests: Sequence[Prepared], concurrency: int, until: float | None = None
) -> list[Record]:
    """Keep ``concurrency`` requests open: each that ends makes room for the next, until all are answered or
    it is ``until`` on the exchange's clock."""
    records: list[Record] = []
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for index, request in waiting:
            now = exchange.now()
            if until is not None and now >= until:
                return
            records.append(await exchange.send(index, request, now))
            if (failure := records[-1].failure) is not None and failure.kind == "unfinished":
                return

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(requests)))]
    await _all(workers, exchange, until)
    return sorted(records, key=lambda record: record.index)


async def _all(tasks: Sequence[asyncio.Task[T]], exchange: Exchange, until: float | None) -> list[T]:
    """The results, once all are there; those that run at ``until`` are told to end."""
    left = None if until is None else max(0.0, until - exchange.now())
    try:
        _, running = await asyncio.wait(tasks, timeout=left)
        for task in running:
            task.cancel()
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
