"""Clients that read slowly get everything; those that do not read are cut off, and cost little until then."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.relay import PIECE_BYTES, Relay, SlowClientError
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving_app, until
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

LONG = {"prompt": [[5], [6], [7], [8]], "n": 16, "max_tokens": 200, "stream": True, "ignore_eos": True}
"""About 3 MB of events."""


async def numbers(count: int, every: int = 10**9, error: Exception | None = None) -> AsyncGenerator[int]:
    for number in range(count):
        if number % every == 0:
            await asyncio.sleep(0)
        yield number
    if error is not None:
        raise error


class TestRelay:
    @given(
        count=st.integers(0, 200),
        every=st.integers(1, 50),
        pauses=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        fails=st.booleans(),
    )
    @settings(max_examples=40, deadline=None)
    def test_everything_arrives_in_order(
        self, count: int, every: int, pauses: list[int], fails: bool
    ) -> None:
        written: list[int] = []
        error = ValueError("the source") if fails else None

        async def write(items: list[int]) -> None:
            for _ in range(pauses[len(written) % len(pauses)]):
                await asyncio.sleep(0)
            written.extend(items)

        async def run() -> None:
            relay = Relay[int](lambda _: 1, max_bytes=10**6, patience_s=5)
            if fails:
                with pytest.raises(ValueError, match="the source"):
                    await relay.run(numbers(count, every, error), write)
            else:
                await relay.run(numbers(count, every), write)

        asyncio.run(run())
        assert written == list(range(count)), "what came before an error is written too"

    async def test_what_waits_is_bounded_in_bytes(self) -> None:
        relay = Relay[int](lambda _: 100, max_bytes=1000, patience_s=60)
        taken = 0

        async def source() -> AsyncGenerator[int]:
            nonlocal taken
            for number in range(10**6):
                taken += 1
                await asyncio.sleep(0)
                yield number

        async def never(items: list[int]) -> None:
            await asyncio.sleep(60)

        with pytest.raises(SlowClientError, match="1200 bytes are unread"):
            await relay.run(source(), never)
        assert taken <= 14

    async def test_one_item_may_be_larger_than_all_that_may_wait(self) -> None:
        relay = Relay[int](lambda number: number, max_bytes=1000, patience_s=60)
        written: list[int] = []
        read = asyncio.Event()

        async def write(items: list[int]) -> None:
            written.extend(items)
            read.set()

        async def source() -> AsyncGenerator[int]:
            for number in (5000, 10, 7000):
                read.clear()
                yield number
                await read.wait()  # a client that reads what there is

        await relay.run(source(), write)
        assert written == [5000, 10, 7000]

    async def test_a_write_that_takes_too_long_ends_it(self) -> None:
        relay = Relay[int](lambda _: 1, max_bytes=1000, patience_s=0.05)

        async def never(items: list[int]) -> None:
            await asyncio.sleep(60)

        with pytest.raises(SlowClientError, match=r"nothing was read for 0\.05 s"):
            await relay.run(numbers(3), never)

    async def test_pieces_are_of_a_size_that_can_be_written(self) -> None:
        sizes: list[int] = []

        async def write(items: list[int]) -> None:
            sizes.append(1000 * len(items))
            await asyncio.sleep(0)

        await Relay[int](lambda _: 1000, max_bytes=10**9, patience_s=5).run(numbers(1000), write)
        assert sum(sizes) == 10**6 and max(sizes) <= PIECE_BYTES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12], delay=0.001)


def service_of(ring: FakeRing, tokenizer: Tokenizer, backlog: int, patience_s: float) -> CompletionService:
    limits = ApiSettings(max_stream_backlog=backlog, slow_client_seconds=patience_s)
    return CompletionService(ring, tokenizer, limits, RouterMetrics(CollectorRegistry()))


async def ask(url: str) -> socket.socket:
    """Sends the request, and reads nothing."""
    where = urlsplit(url)
    body = json.dumps(LONG).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (where.hostname, where.port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(client, head.encode() + body)
    return client


async def rest(client: socket.socket, pause_s: float = 0.0) -> bytes:
    """All that comes until the connection ends, or the stream does."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    try:
        while chunk := await loop.sock_recv(client, 65536):
            received += chunk
            if received.endswith(b"0\r\n\r\n"):
                break
            await asyncio.sleep(pause_s)
    except ConnectionResetError:
        pass
    return bytes(received)


def cut_off(service: CompletionService) -> float | None:
    labels = {"endpoint": "/v1/completions"}
    return service.metrics.registry.get_sample_value("baton_slow_clients_total", labels)


@pytest.mark.parametrize(
    ("backlog", "patience_s"), [(128 * 1024, 60.0), (64 << 20, 0.4)], ids=["too much", "too long"]
)
async def test_a_client_that_does_not_read_is_cut_off(
    ring: FakeRing, tokenizer: Tokenizer, backlog: int, patience_s: float
) -> None:
    service = service_of(ring, tokenizer, backlog, patience_s)
    async with serving_app(app_for(service), send_buffer=4096) as url:
        client = await ask(url)
        await until(lambda: len(ring.calls) == 64, 5)
        mine = ring.calls[:]
        async with httpx.AsyncClient(base_url=url, timeout=20) as other:
            body = {"prompt": [9], "max_tokens": 100, "ignore_eos": True}
            answered = await other.post("/v1/completions", json=body)
        assert answered.json()["usage"]["completion_tokens"] == 100, "others notice nothing"
        await until(lambda: all(call.closed or call.finished for call in mine), 10)
        await until(lambda: cut_off(service) == 1)
        assert b"[DONE]" not in await asyncio.wait_for(rest(client), 5), "the connection is gone"
        client.close()
    if patience_s > 1:
        assert any(call.closed for call in mine), "what was not computed yet never is"


async def test_a_client_that_reads_slowly_gets_everything(ring: FakeRing, tokenizer: Tokenizer) -> None:
    service = service_of(ring, tokenizer, 64 << 20, 30.0)
    async with serving_app(app_for(service), send_buffer=4096) as url:
        client = await ask(url)
        await asyncio.sleep(0.5)
        received = await asyncio.wait_for(rest(client), 30)
        client.close()
    assert received.count(b'"finish_reason":"length"') == 64
    assert received.count(b"data: {") == 64 * 200 and received.count(b"data: [DONE]") == 1
    assert not ring.cancelled


async def test_a_grpc_client_that_does_not_read_is_cut_off(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.delay = 0.0005
    service = service_of(ring, tokenizer, 64 * 1024, 0.5)
    server = grpc.aio.server()
    add_services(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    params = pb.SamplingParams(max_tokens=200, ignore_eos=True, logprobs=20)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 20), params=params)
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(asked) for _ in range(8)]
        for call in calls:
            await call.read()
        await until(lambda: len(ring.calls) == 8 and all(c.closed or c.finished for c in ring.calls), 10)
        await asyncio.sleep(0.8)
        again = stub.Generate(
            pb.GenerateRequest(token_ids=asked.token_ids, params=pb.SamplingParams(max_tokens=3))
        )
        assert [response async for response in again], "others are answered"
        for call in calls:
            call.cancel()
    await server.stop(0)
