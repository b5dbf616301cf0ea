"""Cached blocks are shared within one salt: through placement, handoff and resuming, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.security.salts import CacheSalts
from baton.router.shared.limits import Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app
from tests.support.local_worker import LocalWorker, local_ring, salted_answer, until
from tests.support.tiny_tokenizers import byte_level_tokenizer

PROMPT = [(7 * i) % 50 + 1 for i in range(41)]


async def test_a_handoff_carries_the_salt() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        first, cached = await salted_answer(ring, "1", PROMPT, 6, b"a")
        assert cached == 0
        again, cached = await salted_answer(ring, "2", PROMPT, 6, b"a")
        assert cached == 40 and again == first
        for number, salt in enumerate((b"b", b"")):
            other, cached = await salted_answer(ring, f"3-{number}", PROMPT, 6, salt)
            assert cached == 0 and other == first
        assert decode.decode.counters.committed == 4
        # Decode keeps them apart too: else it would have asked for no blocks the third time.
        await until(lambda: decode.engine.stats().blocks.held == 0)
        assert decode.engine.stats().blocks.cached >= 3 * (len(PROMPT) // decode.engine.pool.block_size)


async def test_placement_looks_for_the_prompt_under_its_salt(caplog: pytest.LogCaptureFixture) -> None:
    """What a decision says that it counted on; where it goes depends on how quick both are as well."""
    workers = [LocalWorker("both", step_s=0.03), LocalWorker("both", step_s=0.03)]
    async with local_ring(workers) as ring:
        await salted_answer(ring, "1", PROMPT, 3, b"a")
        prefixes = ring.fleet.placer._prefixes
        await until(lambda: prefixes.cached(PROMPT, b"a"))
        assert not prefixes.cached(PROMPT, b"b") and not prefixes.cached(PROMPT)
        [holder] = prefixes.cached(PROMPT, b"a")
        caplog.set_level(logging.DEBUG, "baton.router.placement.placer")
        for salt, counted in ((b"a", "40"), (b"b", "0"), (b"", "0")):
            caplog.clear()
            _, cached = await salted_answer(ring, f"2-{salt!r}", PROMPT, 3, salt)
            [decision] = [
                record.getMessage() for record in caplog.records if " is placed: " in record.message
            ]
            assert re.findall(rf"{holder}: [^;]*?cached (\d+)", decision) == [counted]
            assert cached == (int(counted) if f" at {holder}: " in decision else 0)


async def test_a_request_that_goes_on_elsewhere_keeps_its_salt() -> None:
    first, second = LocalWorker("both", step_s=0.02), LocalWorker("both", step_s=0.02)
    async with local_ring([first, second]) as ring:
        alone, _ = await salted_answer(ring, "0", PROMPT, 30, b"z")
        await until(lambda: all(worker.engine.stats().running == 0 for worker in (first, second)))
        task = asyncio.create_task(salted_answer(ring, "1", PROMPT, 30, b"a"))
        await until(lambda: any(worker.engine.stats().running for worker in (first, second)))
        dies, stays = (first, second) if first.engine.stats().running else (second, first)
        await asyncio.sleep(0.2)
        await dies.stop()
        tokens, _ = await task
        assert tokens == alone
        for salt, expected in ((b"a", 40), (b"b", 0)):
            _, cached = await salted_answer(ring, f"2-{salt!r}", PROMPT, 3, salt)
            assert cached == expected, f"{salt!r} on the worker that stays"
        assert stays.engine.stats().blocks.cached


def test_salts_are_keyed_by_the_cluster_key() -> None:
    """Everything else that a tenant's salt is made of is known to whoever reads the digests of blocks."""
    tenant = Client(tenant=Tenant("acme"), key="acme-ci").cache_salt(None)
    ours = CacheSalts(b"the key of a ring").of(tenant)
    assert len(ours) == 32 and ours != tenant
    assert CacheSalts(b"the key of a ring").of(tenant) == ours, "on every router of the ring"
    assert CacheSalts(b"the key of another").of(tenant) != ours
    other = Client(tenant=Tenant("other"), key="o").cache_salt(None)
    given = Client(tenant=Tenant("acme"), key="acme-ci").cache_salt("mine")
    assert len({ours, *map(CacheSalts(b"the key of a ring").of, (other, given))}) == 3
    assert CacheSalts(b"the key of a ring").of(Client(tenant=Tenant()).cache_salt(None)) == b""


async def test_workers_see_the_keyed_salt(tokenizer: Tokenizer) -> None:
    salts, client = CacheSalts(b"the key of a ring"), Client(tenant=Tenant("acme"), key="a")
    authentication = Authentication({"a": client}.get, Tenant())
    async with local_ring([LocalWorker("both")]) as ring:
        service = CompletionService(
            ring,
            tokenizer,
            ApiSettings(),
            RouterMetrics(CollectorRegistry()),
            authentication=authentication,
            salts=salts,
        )
        async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as found:
            assert await cached(found, "a") == 0
            assert await cached(found, "a") == 40
        prefixes = ring.fleet.placer._prefixes
        await until(lambda: prefixes.cached(PROMPT, salts.of(client.cache_salt(None))))
        assert not prefixes.cached(PROMPT, client.cache_salt(None)), (
            "what anybody could compute finds nothing"
        )
        _, found_by_ring = await salted_answer(ring, "1", PROMPT, 3, client.cache_salt(None))
        assert found_by_ring == 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """A whole ring behind HTTP, with the keys ``a`` and ``a2`` of one tenant, and ``b`` of another."""
    tenants = {"a": "acme", "a2": "acme", "b": "other"}
    clients = {key: Client(tenant=Tenant(name), key=key) for key, name in tenants.items()}
    async with local_ring([LocalWorker("prefill"), LocalWorker("decode")]) as ring:
        service = CompletionService(
            ring,
            tokenizer,
            ApiSettings(),
            RouterMetrics(CollectorRegistry()),
            authentication=Authentication(clients.get, Tenant()),
        )
        async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as found:
            yield found


async def cached(client: httpx.AsyncClient, key: str, **fields: object) -> int:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}
    response = await client.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_tenants_share_nothing_and_their_keys_do(client: httpx.AsyncClient) -> None:
    assert [await cached(client, key) for key in ("a", "a", "a2", "b", "b")] == [0, 40, 40, 0, 40]


async def test_a_salt_of_the_request_divides_a_tenants_own_cache(client: httpx.AsyncClient) -> None:
    found = [
        await cached(client, key, cache_salt=salt)
        for key, salt in (("a", "s"), ("a", "s"), ("a", "t"), ("b", "s"))
    ]
    assert found == [0, 40, 0, 0]
    refused = await client.post(
        "/v1/completions", json={"prompt": PROMPT, "cache_salt": ""}, headers={"x-api-key": "a"}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
