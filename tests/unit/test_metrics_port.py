"""A metrics port answers whoever asks, and costs the process nothing by those who do not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.telemetry import exposition
from baton.telemetry.exposition import MetricsPort
from baton.telemetry.serve import serve_metrics
from tests.support.api_server import until


class Open(NamedTuple):
    port: int
    serving: MetricsPort

    @property
    def connections(self) -> int:
        return len(self.serving._silent) + len(self.serving._asked)

    async def get(self, path: str = "/metrics", method: str = "GET", **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=20) as client:
            return await client.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers)

    async def say(self, data: bytes) -> bytes:
        """The whole answer to some bytes."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("one", "The first.", registry=registry).set(1)
    Gauge("two", "The second.", registry=registry).set(2)
    return registry


@pytest.fixture
async def port(registry: CollectorRegistry) -> AsyncIterator[Open]:
    serving = MetricsPort(registry)
    yield Open(await serving.open("127.0.0.1", 0), serving)
    await serving.close()


async def test_metrics_are_told_in_the_form_that_is_asked_for(port: Open) -> None:
    plain = await port.get()
    assert plain.status_code == 200 and plain.headers["content-type"].startswith("text/plain")
    assert "one 1.0" in plain.text and "two 2.0" in plain.text
    some = await port.get("/metrics?name[]=one")
    assert "one 1.0" in some.text and "two" not in some.text
    zipped = await port.get(**{"accept-encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip" and zipped.text == plain.text
    newer = await port.get(accept="application/openmetrics-text; version=1.0.0")
    assert newer.headers["content-type"].startswith("application/openmetrics-text")
    assert newer.text.endswith("# EOF\n")
    head = await port.get(method="HEAD")
    assert head.status_code == 200 and not head.content


async def test_what_is_no_question_is_refused(port: Open) -> None:
    assert (await port.get(method="POST")).status_code == 405
    assert (await port.say(b"what\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    much = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n"
    assert (await port.say(much)).startswith(b"HTTP/1.1 431 ")
    assert (await port.get()).status_code == 200
    await until(lambda: not port.connections)


async def test_silent_connections_cost_no_thread_and_hold_up_no_scrape(port: Open) -> None:
    threads = threading.active_count()
    silent = [await port.connect() for _ in range(400)]
    half = [await port.connect() for _ in range(20)]
    for _, writer in half:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: a")
    began = time.monotonic()
    assert (await port.get()).status_code == 200
    assert time.monotonic() - began < 2
    assert port.connections <= exposition.MAX_CONNECTIONS
    assert threading.active_count() <= threads + 1, "the one that writes pages"
    for _, writer in silent + half:
        writer.close()
    await until(lambda: not port.connections)


async def test_a_connection_that_says_nothing_is_closed(port: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "HEAD_S", 0.2)
    reader, writer = await port.connect()
    writer.write(b"GET /metrics HTTP/1.1\r\n")
    began = time.monotonic()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    assert 0.1 < time.monotonic() - began < 2
    writer.close()


async def test_an_answer_that_nobody_takes_is_given_up(
    registry: CollectorRegistry, port: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "ANSWER_S", 0.2)
    registry.register(_Long())
    reader, writer = await port.connect()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await until(lambda: port.connections == 1)
    await until(lambda: not port.connections)
    writer.close()


async def test_those_that_have_asked_make_room_too(port: Open) -> None:
    """Of connections that stay after their answer, the oldest go, and no scrape is refused."""
    staying = [await port.connect() for _ in range(60)]
    for _, writer in staying:
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert (await port.get()).status_code == 200
    assert port.connections <= exposition.MAX_CONNECTIONS
    for _, writer in staying:
        writer.close()
    await until(lambda: not port.connections)


async def test_pages_are_written_beside_the_loop(registry: CollectorRegistry, port: Open) -> None:
    class Slow(Collector):
        def collect(self) -> list[Metric]:
            time.sleep(0.3)
            return []

        def describe(self) -> list[Metric]:
            return []

    registry.register(Slow())
    asking = asyncio.create_task(port.get())
    longest = 0.0
    while not asking.done():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    assert (await asking).status_code == 200 and longest < 0.2


async def test_the_port_is_there_until_the_stack_unwinds(registry: CollectorRegistry) -> None:
    async with AsyncExitStack() as stack:
        assert await serve_metrics("127.0.0.1", -1, registry, stack) is None
        port = await serve_metrics("127.0.0.1", 0, registry, stack)
        assert port is not None
        with pytest.raises(OSError, match="in use"):
            await serve_metrics("127.0.0.1", port, registry, stack)
        _, open_one = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)
    open_one.close()


class _Long(Collector):
    """More than sockets hold."""

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily("long", "A long one.", labels=["name"])
        for number in range(200):
            family.add_metric([f"{number}-" + "x" * 50_000], 1)
        return [family]

    def describe(self) -> list[Metric]:
        return []
