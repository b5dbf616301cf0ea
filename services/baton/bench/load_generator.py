"""Offers requests to a server, either at given times or a number of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from baton.bench.exchange import Prepared, RequestSender
from baton.bench.record import RequestRecord

T = TypeVar("T")


async def open_loop(
    exchange: RequestSender, requests: Sequence[Prepared], times: Sequence[float], until: float | None = None
) -> list[RequestRecord]:
    """Send each request at its time, in seconds of the exchange's clock, whether or not earlier ones have
    ended.

    The times are kept: a client that is late sends at once and does not delay later requests. Requests that
    have not ended at ``until`` are given up.
    """
    tasks: list[asyncio.Task[RequestRecord]] = []
    for index, (request, due) in enumerate(zip(requests, times, strict=True)):
        # Sleep even when late, so that many requests at one time do not hold up the answers to the first of
        # them.
        await asyncio.sleep(max(0.0, due - exchange.now()))
        tasks.append(asyncio.create_task(exchange.send(index, request, due)))
    return await _all(tasks, exchange, until)


async def closed_loop(
    exchange: RequestSender, requests: Sequence[Prepared], concurrency: int, until: float | None = None
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests open: each that ends is followed by the next one, until all are answered
    or the exchange's clock reads ``until``."""
    records: list[RequestRecord] = []
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


async def _all(tasks: Sequence[asyncio.Task[T]], exchange: RequestSender, until: float | None) -> list[T]:
    """Wait for all results; tasks that still run at ``until`` are cancelled."""
    left = None if until is None else max(0.0, until - exchange.now())
    try:
        _, running = await asyncio.wait(tasks, timeout=left)
        for task in running:
            task.cancel()
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
