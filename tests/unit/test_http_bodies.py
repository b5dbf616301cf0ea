"""Bodies under way: how fast they must come, how much of them is held, and whose."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.errors import ApiError
from baton.router.api.http.app import app_for
from baton.router.api.http.server import bodies, body, connection, decode
from baton.router.api.http.server.bodies import SMALL, BodyBudget
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.http import HttpMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app, until
from tests.support.deep import all_deep_but
from tests.support.fake_ring import FakeRing
from tests.support.raw_http import Answer, connected, get, post
from tests.support.tiny_tokenizers import byte_level_tokenizer

COMPLETIONS = "/v1/completions"
ENDPOINTS = (
    COMPLETIONS,
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
MIB = 1 << 20
TENANTS = {"evil": Tenant("evil"), "good": Tenant("good"), "one": Tenant("one", Limits(concurrent=1))}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


class Front:
    """The API on a port of its own, in front of a ring that knows its answers."""

    def __init__(self, url: str, metrics: RouterMetrics) -> None:
        self.url = url
        self._metrics = metrics

    def value(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(name, labels) or 0.0

    def refused(self, reason: str) -> float:
        return self.value("baton_http_refused_total", reason=reason)

    @property
    def reserved(self) -> float:
        return self.value("baton_http_body_bytes")

    async def ask(self, sent: bytes) -> Answer:
        async with connected(self.url) as client:
            await client.send(sent)
            return await client.answer()


@asynccontextmanager
async def front(
    tokenizer: Tokenizer, *, keys: bool = False, settings: ApiSettings | None = None
) -> AsyncIterator[Front]:
    """``keys``: each tenant's is its name."""

    def find(key: str) -> Client | None:
        return Client(tenant=TENANTS[key], key=key) if key in TENANTS else None

    metrics = RouterMetrics(CollectorRegistry())
    ring = FakeRing(lambda call: [10, 11, 12])
    authentication = Authentication(find, Tenant()) if keys else None
    service = CompletionService(
        ring, tokenizer, settings or ApiSettings(), metrics, authentication=authentication
    )
    async with serving_app(app_for(service), http=metrics.http) as url:
        yield Front(url, metrics)


def begun(key: str | None = None, length: int = 8 * MIB, path: str = COMPLETIONS) -> bytes:
    """A head, and the first byte of a body."""
    return post(path, b" ", *([] if key is None else [f"x-api-key: {key}"]), length=length)


class TestRate:
    @pytest.fixture(autouse=True)
    def hurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(body, "BODY_GRACE_S", 0.3)
        monkeypatch.setattr(connection, "BODY_PATIENCE_S", 0.8)
        monkeypatch.setattr(connection, "MIN_BODY_RATE", 10_000)

    @pytest.mark.parametrize("path", ENDPOINTS)
    async def test_a_body_without_end_is_told(self, tokenizer: Tokenizer, path: str) -> None:
        async with front(tokenizer) as at, connected(at.url) as client:
            await client.send(begun(path=path))
            answer = await client.answer(2)
            assert answer.status == 408 and answer.headers["connection"] == "close"
            assert "too slowly" in json.loads(answer.body)["error"]["message"]
            assert await client.end(1) == b""
            assert at.refused("slow_body") == 1 and at.reserved == 0
            assert at.value("baton_requests_total", endpoint=path, status="408") == 1

    async def test_a_body_that_never_begins_is_told(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer) as at:
            answer = await asyncio.wait_for(at.ask(post(COMPLETIONS, b"", length=100)), 2)
            assert answer.status == 408 and "0 bytes so far" in answer.error["message"]

    async def test_a_slow_and_honest_body_is_read(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer) as at, connected(at.url) as client:
            sent = post(COMPLETIONS, BODY + b" " * 12_000)
            for start in range(0, len(sent), 800):  # 16 KB/s for 0.75 s
                await client.send(sent[start : start + 800])
                await asyncio.sleep(0.05)
            assert (await client.answer()).status == 200

    async def test_what_came_fast_is_not_held_for_long(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer) as at, connected(at.url) as client:
            await client.send(post(COMPLETIONS, b" " * MIB, length=MIB + 50))
            started = asyncio.get_running_loop().time()

            async def trickle() -> None:
                while True:
                    await client.send(b" ")
                    await asyncio.sleep(0.1)

            trickling = asyncio.create_task(trickle())
            assert (await client.answer(3)).status == 408
            assert asyncio.get_running_loop().time() - started > 0.6
            trickling.cancel()

    async def test_bytes_of_chunks_are_no_bytes_of_a_body(self, tokenizer: Tokenizer) -> None:
        head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        async with front(tokenizer) as at, connected(at.url) as client:
            await client.send(head)

            async def extend() -> None:
                while True:
                    await client.send(b"1;" + b"e" * 2000 + b"\r\n \r\n")
                    await asyncio.sleep(0.01)

            extending = asyncio.create_task(extend())
            assert (await client.answer(2)).status == 408
            extending.cancel()


class TestBudget:
    async def test_a_declared_size_is_reserved_until_the_request_is_understood(
        self, tokenizer: Tokenizer
    ) -> None:
        async with front(tokenizer) as at, connected(at.url) as client:
            await client.send(begun(length=5 * MIB))
            await until(lambda: at.reserved == 5 * MIB)
            client.close()
            await until(lambda: at.reserved == 0)
            assert (await at.ask(post(COMPLETIONS, BODY))).status == 200
            assert at.reserved == 0

    async def test_a_body_in_chunks_is_reserved_as_it_grows(self, tokenizer: Tokenizer) -> None:
        head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        async with front(tokenizer) as at, connected(at.url) as client:
            await client.send(head + b"3e8\r\n" + b" " * 1000)
            await until(lambda: at.reserved == 1000)
            await client.send(b"\r\n7d0\r\n" + b" " * 2000)
            await until(lambda: at.reserved == 3000)

    async def test_a_body_that_comes_whole_is_bounded_as_well(self, tokenizer: Tokenizer) -> None:
        head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        for most, status in ((len(BODY), 200), (len(BODY) - 1, 413)):
            async with front(tokenizer, settings=ApiSettings(max_body_bytes=most)) as at:
                assert (await at.ask(head + body)).status == status
                assert at.reserved == 0

    async def test_beyond_all_there_is_503(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer) as at, AsyncExitStack() as stack:
            for _ in range(6):
                client = await stack.enter_async_context(connected(at.url))
                await client.send(begun())
            await until(lambda: at.reserved == 48 * MIB)
            answer = await at.ask(begun())
            assert answer.status == 503 and answer.error["code"] == "overloaded"
            assert answer.headers["retry-after"] == "1" and answer.headers["x-should-retry"] == "true"
            assert (await at.ask(post(COMPLETIONS, BODY))).status == 200, "small ones are read"
            assert at.refused("body_bytes") == 1

    async def test_beyond_its_share_a_tenant_gets_429(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer, keys=True) as at, AsyncExitStack() as stack:
            for _ in range(3):
                client = await stack.enter_async_context(connected(at.url))
                await client.send(begun("evil"))
            await until(lambda: at.reserved == 24 * MIB)
            answer = await at.ask(begun("evil"))
            assert answer.status == 429 and answer.error["code"] == "rate_limit_exceeded"
            assert "evil" in answer.error["message"] and answer.headers["retry-after"] == "1"
            assert at.refused("tenant_body_bytes") == 1
            good = await stack.enter_async_context(connected(at.url))
            await good.send(begun("good"))
            await until(lambda: at.reserved == 32 * MIB)
            assert (await at.ask(post(COMPLETIONS, BODY, "x-api-key: evil"))).status == 200

    async def test_a_tenant_reads_no_more_bodies_than_it_may_have_requests(
        self, tokenizer: Tokenizer
    ) -> None:
        async with front(tokenizer, keys=True) as at, connected(at.url) as client:
            await client.send(begun("one", 1000))
            await until(lambda: at.reserved == 1000)
            answer = await at.ask(post(COMPLETIONS, BODY, "x-api-key: one"))
            assert answer.status == 429 and "1 concurrent" in answer.error["message"]
            assert at.refused("tenant_bodies") == 1
            assert (await at.ask(post(COMPLETIONS, BODY, "x-api-key: good"))).status == 200

    @pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/models", "/debug/requests", "/nowhere"])
    async def test_a_strangers_body_is_never_read(self, tokenizer: Tokenizer, path: str) -> None:
        async with front(tokenizer, keys=True) as at:
            answer = await at.ask(begun("unknown", path=path))
            assert answer.status == 401 and at.reserved == 0

    @pytest.mark.parametrize(
        ("path", "key", "status"),
        all_deep_but(
            1,
            [
                ("/nowhere", "evil", 404),
                ("/v1/models", "evil", 405),
                ("/health", None, 405),
                (COMPLETIONS, None, 401),
            ],
        ),
    )
    async def test_what_nobody_wants_is_not_held(
        self, tokenizer: Tokenizer, path: str, key: str | None, status: int
    ) -> None:
        process = psutil.Process()
        async with front(tokenizer, keys=True) as at, AsyncExitStack() as stack:
            gc.collect()
            before = process.memory_info().rss
            for _ in range(5):
                client = await stack.enter_async_context(connected(at.url))
                await client.send(begun(key, length=10**9, path=path))
                assert (await client.answer()).status == status
                for _ in range(4):
                    await client.send(b"a" * (8 * MIB))
            assert process.memory_info().rss - before < 64 * MIB, "160 MiB were sent"

    def test_shares(self) -> None:
        budget = BodyBudget(8 * MIB, HttpMetrics(CollectorRegistry()), shared=True)
        evil, good = budget.reservation(TENANTS["evil"]), budget.reservation(TENANTS["good"])
        with evil:
            evil.grow_to(24 * MIB)
            with pytest.raises(ApiError) as refused:
                evil.grow_to(24 * MIB + 1)
            assert refused.value.status == 429
            with good:
                good.grow_to(12 * MIB)
                with pytest.raises(ApiError):
                    good.grow_to(12 * MIB + 1)
        with good:
            good.grow_to(24 * MIB)

    def test_small_bodies_have_room_of_their_own(self) -> None:
        budget = BodyBudget(MIB, HttpMetrics(CollectorRegistry()), shared=False)
        large = [budget.reservation(Tenant()) for _ in range(48)]
        small = [budget.reservation(Tenant()) for _ in range(16 * 16)]
        with ExitStack() as stack:
            for each in large:
                stack.enter_context(each)
                each.grow_to(MIB)
            for each in small:
                stack.enter_context(each)
                each.grow_to(SMALL)
            last = stack.enter_context(budget.reservation(Tenant()))
            with pytest.raises(ApiError, match="overloaded") as refused:
                last.grow_to(1)
            assert refused.value.status == 503

    def test_room_for_eight_of_the_largest(self) -> None:
        metrics = HttpMetrics(CollectorRegistry())
        assert BodyBudget(1024, metrics, shared=False).room == bodies.MIN_IN_ALL
        assert BodyBudget(100 * MIB, metrics, shared=False).room == 800 * MIB


class TestJson:
    """What is wrong with a body that is there."""

    @pytest.mark.parametrize(
        "name",
        ["a` - at `$.messages[9]", "a` - at `$.prompt[9", "a - at `$[" + "9" * 5000 + "]", "`", "x" * 10**6],
    )
    async def test_names_that_look_like_places(self, tokenizer: Tokenizer, name: str) -> None:
        async with front(tokenizer) as at:
            for path, prompt in (
                (COMPLETIONS, {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                sent = json.dumps({**prompt, "structured_outputs": {name: 1}}).encode()
                answer = await at.ask(post(path, sent))
                assert answer.status == 400, answer
                assert answer.error["param"] == "structured_outputs"
                assert len(answer.body) < 1000

    @pytest.mark.parametrize(
        "path", [".messages[9]", ".nothing", ".messages[0].a", ".messages[9999999999]", ".messages[0", "[0]"]
    )
    def test_places_that_lead_nowhere(self, path: str) -> None:
        error = decode._type_error(f"Expected `int` - at `${path}`", {"messages": [1]})
        assert error.message.endswith(": expected int (…).")

    async def test_the_content_type_is_needed(self, tokenizer: Tokenizer) -> None:
        async with front(tokenizer) as at, httpx.AsyncClient(base_url=at.url) as client:
            for path in ENDPOINTS:
                for wrong in ({}, {"content-type": "text/plain"}, {"content-type": ""}):
                    answer = await client.post(path, content=BODY, headers=wrong)
                    assert answer.status_code == 415, (path, wrong)
                    assert "content-type must be application/json" in answer.json()["error"]["message"]
            for given in ("application/json", "Application/JSON;charset=utf-8", "application/x+json"):
                answer = await client.post(COMPLETIONS, content=BODY, headers={"content-type": given})
                assert answer.status_code == 200


async def test_keep_alive_after_a_refused_body(tokenizer: Tokenizer) -> None:
    """The body of a refused request is read over, and the connection serves on."""
    async with front(tokenizer) as at, connected(at.url) as client:
        await client.send(post("/nowhere", b"a" * (2 * MIB)))
        assert (await client.answer()).status == 404
        await client.send(get("/version"))
        assert (await client.answer()).status == 200
