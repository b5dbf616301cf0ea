"""Refused requests leave nothing that waits for the garbage collector, whichever API they ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app
from tests.support.deep import all_deep_but
from tests.support.fake_ring import Call, FakeRing, busy
from tests.support.leftovers import leftovers
from tests.support.raw_http import connected, post
from tests.support.tiny_tokenizers import byte_level_tokenizer

KEYS = {
    "acme": Client(tenant=Tenant("acme"), key="acme"),
    "other": Client(tenant=Tenant("other"), key="other", models=frozenset({"another"})),
    "spent": Client(tenant=Tenant("spent", limits=Limits(requests_per_minute=1)), key="spent"),
}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {**CHAT, "model": "tiny"},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"], "model": "tiny"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
GENERATING = tuple(BODIES)[:4]
JSON = "content-type: application/json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


def has_no_room(call: Call) -> list[int]:
    raise busy()


@asynccontextmanager
async def front(tokenizer: Tokenizer, *, full: bool) -> AsyncIterator[str]:
    metrics = RouterMetrics(CollectorRegistry())
    ring = FakeRing(has_no_room if full else lambda call: [10, 11])
    authentication = Authentication(KEYS.get, Tenant())
    settings = ApiSettings(max_body_bytes=4096)
    service = CompletionService(ring, tokenizer, settings, metrics, authentication=authentication)
    async with serving_app(app_for(service), http=metrics.http) as url:
        yield url


REFUSED: dict[str, tuple[str, int]] = {
    # why -> who asks, and the status
    "no json": ("acme", 400),
    "wrong type": ("acme", 400),
    "no key": ("", 401),
    "no such model": ("acme", 404),
    "not this model": ("other", 404),
    "too large": ("acme", 413),
    "no type": ("acme", 415),
    "limit": ("spent", 429),
    "busy": ("acme", 503),
}


def sent(path: str, why: str) -> bytes:
    asked = dict(BODIES[path])
    headers = [f"x-api-key: {REFUSED[why][0]}"] if REFUSED[why][0] else []
    if why == "wrong type":
        asked["model"] = []
    if why == "no such model":
        asked["model"] = "none"
    body = b"{" if why == "no json" else json.dumps(asked).encode()
    if why == "too large":
        body = body.ljust(8192)
    if why == "no type":
        return post(path, body, *headers).replace(JSON.encode() + b"\r\n", b"")
    return post(path, body, *headers)


CASES = [
    (path, why)
    for path in BODIES
    for why in REFUSED
    # Where nothing is generated, all models count alike, and nobody needs room.
    if path in GENERATING or why not in ("busy", "not this model")
]


@pytest.mark.parametrize(("path", "why"), all_deep_but(3, CASES))
async def test_a_refused_request_leaves_no_garbage(tokenizer: Tokenizer, path: str, why: str) -> None:
    _, status = REFUSED[why]
    if path.startswith("/v1/messages") and status == 503:
        status = 529
    async with front(tokenizer, full=why == "busy") as url:

        async def ask() -> None:
            async with connected(url) as client:
                await client.send(sent(path, why))
                answer = await client.answer()
            assert answer.status == status, answer

        if why == "limit":
            async with connected(url) as client:
                await client.send(sent(path, why))
                assert (await client.answer()).status == 200
        left = await leftovers(ask)
    assert not left
