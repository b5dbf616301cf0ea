"""Limits as clients meet them: over HTTP in OpenAI's shape, over gRPC as RESOURCE_EXHAUSTED."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving_app, until
from tests.support.fake_ring import FakeRing
from tests.support.grpc_errors import metadata_of
from tests.support.tiny_tokenizers import byte_level_tokenizer

BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


def service_of(ring: FakeRing, tokenizer: Tokenizer, limits: Limits) -> CompletionService:
    metrics = RouterMetrics(CollectorRegistry())
    return CompletionService(ring, tokenizer, ApiSettings(), metrics, tenant=Tenant("acme", limits))


@asynccontextmanager
async def client_of(ring: FakeRing, tokenizer: Tokenizer, limits: Limits) -> AsyncIterator[httpx.AsyncClient]:
    service = service_of(ring, tokenizer, limits)
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_requests_over_the_limit_are_told_so_before_any_work(
    ring: FakeRing, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    body = {**BODIES[path], "stream": stream}
    async with client_of(ring, tokenizer, Limits(requests_per_minute=2)) as client:
        for left in (1, 0):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        refused = await client.post(path, json=body)
    assert refused.status_code == 429
    assert 59 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["message"].startswith("The limit of acme is reached: 2 requests per minute. Try again in ")
    assert len(ring.calls) == 2, "the ring never heard of the third"


COUNTED: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "the quick fox"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", COUNTED)
async def test_requests_that_generate_nothing_count_too(
    ring: FakeRing, tokenizer: Tokenizer, path: str
) -> None:
    limits = Limits(requests_per_minute=2, concurrent=1, tokens_per_minute=1)
    async with client_of(ring, tokenizer, limits) as client:
        answered = await client.post(path, json=COUNTED[path])
        assert answered.status_code == 200, answered.text
        assert answered.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await client.post(path, json={})).status_code == 400, "what is wrong counts as well"
        refused = await client.post(path, json=COUNTED[path])
    assert refused.status_code == 429
    assert 59 <= int(refused.headers["retry-after"]) <= 61
    assert "2 requests per minute" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", COUNTED)
async def test_requests_that_generate_nothing_are_concurrent_with_others(
    ring: FakeRing, tokenizer: Tokenizer, path: str
) -> None:
    ring.delay = 0.05
    body = {**BODIES["/v1/completions"], "max_tokens": 100, "stream": True}
    async with client_of(ring, tokenizer, Limits(concurrent=1)) as client:
        async with client.stream("POST", "/v1/completions", json=body):
            assert (await client.post(path, json=COUNTED[path])).status_code == 429
        await until(lambda: not ring.calls or ring.calls[0].closed)
        for _ in range(2):
            assert (await client.post(path, json=COUNTED[path])).status_code == 200, (
                "each gives its place back"
            )


async def test_tokens_are_reserved_and_settled(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.ends = True
    body = {"prompt": [5, 6, 7], "max_tokens": 40}
    async with client_of(ring, tokenizer, Limits(tokens_per_minute=60)) as client:
        first = await client.post("/v1/completions", json=body)
        assert first.headers["x-ratelimit-remaining-tokens"] == "17", "reserved: 3 + 40 of 60"
        second = await client.post("/v1/completions", json=body)
        assert second.headers["x-ratelimit-remaining-tokens"] == str(
            60 - first.json()["usage"]["total_tokens"] - 43
        )
        long = await client.post("/v1/completions", json={"prompt": [5] * 61, "max_tokens": 1})
    assert long.status_code == 429 and long.json()["error"]["code"] == "request_too_large"
    assert "retry-after" not in long.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_chat_without_max_tokens_gets_half_of_what_the_limit_leaves(
    ring: FakeRing, tokenizer: Tokenizer, n: int, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": n, "stream": stream}
    async with client_of(ring, tokenizer, Limits(tokens_per_minute=200)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [prompt] = {len(call.prompt_ids) for call in ring.calls}
    assert [call.params.max_tokens for call in ring.calls] == n * [(200 - prompt) // 2 // n]


TOO_LARGE: list[tuple[str, dict[str, object], str]] = [
    ("/v1/completions", {"prompt": [5], "max_tokens": 60}, "max_tokens"),
    ("/v1/completions", {"prompt": [5], "max_tokens": 20, "n": 4}, "n"),
    ("/v1/completions", {"prompt": [5], "n": 128}, "n"),
    ("/v1/completions", {"prompt": [[5] * 30, [6] * 30], "max_tokens": 1}, "prompt"),
    ("/v1/completions", {"prompt": [5], "max_tokens": 10, "best_of": 8, "use_beam_search": True}, "best_of"),
    ("/v1/chat/completions", {"max_tokens": 60}, "max_tokens"),
    ("/v1/chat/completions", {"max_completion_tokens": 60}, "max_completion_tokens"),
    ("/v1/chat/completions", {"n": 64}, "n"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 60}, "max_output_tokens"),
    ("/v1/responses", {"input": "hi" * 40}, "input"),
    ("/v1/messages", {"max_tokens": 60}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), TOO_LARGE)
async def test_what_never_fits_is_refused_by_the_name_of_its_field(
    ring: FakeRing, tokenizer: Tokenizer, path: str, fields: dict[str, object], param: str
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = fields if "prompt" in fields or "input" in fields else {"messages": messages, **fields}
    async with client_of(ring, tokenizer, Limits(tokens_per_minute=60)) as client:
        refused = await client.post(path, json=body)
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    assert error["message"].startswith(f"{param}: ") and "60 tokens per minute" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "rate_limit_error"
    else:
        assert (error["code"], error["param"]) == ("request_too_large", param)
    assert "retry-after" not in refused.headers and refused.headers["x-should-retry"] == "false"
    assert not ring.calls


async def test_over_grpc_what_never_fits_is_refused_likewise(ring: FakeRing, tokenizer: Tokenizer) -> None:
    server = grpc.aio.server()
    add_services(server, service_of(ring, tokenizer, Limits(tokens_per_minute=60)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompt = pb.TokenIds(ids=[5] * 10)
        assert [response async for response in stub.Generate(pb.GenerateRequest(token_ids=prompt))]
        asked = pb.GenerateRequest(token_ids=prompt, params=pb.SamplingParams(max_tokens=51))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [response async for response in stub.Generate(asked)]
    assert [call.params.max_tokens for call in ring.calls] == [25]
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = metadata_of(refused.value)
    assert (metadata["baton-error-code"], metadata["baton-error-param"]) == (
        "request_too_large",
        "max_tokens",
    )
    await server.stop(0)


async def test_an_abandoned_stream_is_no_longer_under_way(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.delay = 0.02
    body = {"prompt": [5], "max_tokens": 200, "stream": True}
    async with client_of(ring, tokenizer, Limits(concurrent=1)) as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert (await client.post("/v1/completions", json=BODIES["/v1/completions"])).status_code == 429
        for _ in range(100):
            again = await client.post("/v1/completions", json=BODIES["/v1/completions"])
            if again.status_code == 200:
                break
        assert again.status_code == 200


async def test_over_grpc_it_is_resource_exhausted(ring: FakeRing, tokenizer: Tokenizer) -> None:
    server = grpc.aio.server()
    add_services(server, service_of(ring, tokenizer, Limits(requests_per_minute=1)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asked = pb.GenerateRequest(model="tiny", text="the fox", params=pb.SamplingParams(max_tokens=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(asked)
        assert [response async for response in call]
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [response async for response in stub.Generate(asked)]
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = metadata_of(refused.value)
    assert metadata["baton-error-code"] == "rate_limit_exceeded" and int(metadata["retry-after"]) > 50
    await server.stop(0)


async def test_health_tells_that_the_workers_are_not_known_any_more(
    ring: FakeRing, tokenizer: Tokenizer
) -> None:
    async with client_of(ring, tokenizer, Limits()) as client:
        assert (await client.get("/health")).status_code == 200
        ring.stale, ring.ready = True, False
        stale = await client.get("/health")
    assert (stale.status_code, stale.json()["error"]["code"]) == (503, "discovery_stale")
