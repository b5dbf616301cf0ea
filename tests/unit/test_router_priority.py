"""What clients say of the priority of a request: ``priority``, ``x-request-timeout`` and gRPC's deadline."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.grpc.service import add_services
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import deadline_exceeded
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving
from tests.support.fake_ring import MODEL, FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12], model=replace(MODEL, takes_priorities=True))


@pytest.fixture
async def client(ring: FakeRing, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
async def test_http_tells_the_ring(client: httpx.AsyncClient, ring: FakeRing, path: str) -> None:
    began = time.monotonic()
    response = await client.post(
        path, json={**BODIES[path], "priority": -7}, headers={"x-request-timeout": "2.5"}
    )
    assert response.status_code == 200, response.text
    assert (await client.post(path, json=BODIES[path])).status_code == 200
    urgent, calm = (call.priority for call in ring.calls)
    assert urgent.level == -7
    assert began <= urgent.since <= time.monotonic()
    assert urgent.deadline == urgent.since + 2.5
    assert (calm.level, calm.deadline) == (0, None)


@pytest.mark.parametrize(
    ("fields", "headers", "param", "message"),
    [
        ({"priority": 101}, {}, "priority", "between -100 and 100, not 101"),
        ({"priority": 1.5}, {}, "priority", "1.5"),
        ({}, {"x-request-timeout": "soon"}, "x-request-timeout", 'a number of seconds, not "soon"'),
        ({}, {"x-request-timeout": "0"}, "x-request-timeout", "above 0 and at most 86400 seconds, not 0"),
        ({}, {"x-request-timeout": "-1"}, "x-request-timeout", "not -1"),
        ({}, {"x-request-timeout": "86401"}, "x-request-timeout", "not 86401"),
        ({}, {"x-request-timeout": "nan"}, "x-request-timeout", "not nan"),
        ({}, {"x-request-timeout": "inf"}, "x-request-timeout", "not inf"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_bad_values(
    client: httpx.AsyncClient,
    ring: FakeRing,
    path: str,
    fields: dict[str, object],
    headers: dict[str, str],
    param: str,
    message: str,
) -> None:
    response = await client.post(path, json={**BODIES[path], **fields}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert ring.calls == []


async def test_a_priority_is_taken_and_told_where_workers_heed_none(
    client: httpx.AsyncClient, ring: FakeRing
) -> None:
    ring.model = MODEL
    response = await client.post("/v1/completions", json={"prompt": "a", "priority": 1})
    assert response.status_code == 200
    assert response.headers["x-baton-ignored-fields"] == "priority"
    assert ring.calls[0].priority.level == 0
    usual = await client.post("/v1/completions", json={"prompt": "a", "priority": 0})
    assert usual.status_code == 200 and "x-baton-ignored-fields" not in usual.headers
    response = await client.post("/v1/completions", json={"prompt": "a", "priority": 101})
    assert response.status_code == 400, "no request may have it"


async def test_a_passed_deadline_in_http(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.error = deadline_exceeded()
    metrics = RouterMetrics(CollectorRegistry())
    async with serving(ring, tokenizer, None, metrics) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("deadline_exceeded", "deadline_exceeded")
        ring.fail_after = 2
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-2])["error"] == error
        assert events[-1] == "[DONE]"
    labels = {"endpoint": "/v1/completions", "model": "tiny", "finish_reason": "deadline_exceeded"}
    assert metrics.registry.get_sample_value("baton_choices_total", labels) == 2


@asynccontextmanager
async def stub_of(
    ring: FakeRing, tokenizer: Tokenizer
) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    server = grpc.aio.server()
    metrics = RouterMetrics(CollectorRegistry())
    add_services(server, CompletionService(ring, tokenizer, ApiSettings(), metrics))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield inference_pb2_grpc.InferenceStub(channel)
    finally:
        await server.stop(0)


async def test_grpc_tells_the_ring(ring: FakeRing, tokenizer: Tokenizer) -> None:
    asked = pb.GenerateRequest(text="a", priority=4)
    async with stub_of(ring, tokenizer) as stub:
        assert [response async for response in stub.Generate(asked, timeout=20)]
        assert [response async for response in stub.Generate(asked)]
    timed, untimed = (call.priority for call in ring.calls)
    assert (timed.level, untimed.level, untimed.deadline) == (4, 4, None)
    assert timed.deadline is not None
    # From 10 s on, gRPC sends what remains in steps of 100 ms, and rounds up.
    assert 15 < timed.deadline - timed.since <= 20.1


async def test_a_passed_deadline_in_grpc(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.error = deadline_exceeded()
    async with stub_of(ring, tokenizer) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [response async for response in stub.Generate(pb.GenerateRequest(text="a"))]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [r async for r in stub.Generate(pb.GenerateRequest(text="a", priority=-101))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
