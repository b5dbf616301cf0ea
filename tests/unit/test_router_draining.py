"""What a router that drains answers still."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

import baton
from baton.router.api.http.ops.draining import draining_app
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer


@pytest.fixture
def http(tmp_path: Path) -> httpx.AsyncClient:
    metrics = RouterMetrics(CollectorRegistry())
    ModelMetrics(metrics, "demo").generated_tokens.inc(12345)
    ring = FakeRing(lambda call: [70])
    service = CompletionService(ring, byte_level_tokenizer(tmp_path), ApiSettings(), metrics)
    return httpx.AsyncClient(transport=httpx.ASGITransport(draining_app(service)), base_url="http://router")


async def test_the_last_figures_can_be_had_and_it_lives(http: httpx.AsyncClient) -> None:
    page = await http.get("/metrics")
    assert page.status_code == 200 and "12345" in page.text
    assert (await http.get("/version")).json() == {"version": baton.__version__}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/ui"), ("GET", "/")],
)
async def test_all_else_is_another_routers(http: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path, headers={"x-request-id": "mine"})
    assert answer.status_code == 503
    assert answer.headers["x-request-id"] == "mine" and answer.headers["x-baton-request-id"]
    assert answer.headers["connection"] == "close" and "retry-after" in answer.headers
    code = answer.json()["error"]
    assert code.get("code", code.get("type")) == "draining"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_clients_hear_it_their_way(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={})
    assert answer.status_code == 529
    assert answer.headers["connection"] == "close" and answer.headers["x-should-retry"] == "true"
    assert "retry-after" in answer.headers
    body = answer.json()
    assert body["error"]["type"] == "overloaded_error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-baton-request-id"]
