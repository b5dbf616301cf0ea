"""A router without keys on a loopback address hears no page of the web; and what strangers hear of health."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.http.server.cors import Cors
from baton.router.api.http.server.local_pages import is_loopback
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.shared.limits import Tenant
from baton.router.shared.state import SharedState
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

PATHS = ("/health", "/metrics", "/version", "/v1/models", "/debug/requests", "/nowhere")
KEYS = {
    "all": Client(tenant=Tenant(), key="all"),
    "one": Client(tenant=Tenant(), key="one", models=frozenset({"tiny"})),
    "none": Client(tenant=Tenant(), key="none", models=frozenset({"other"})),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


def services(
    tokenizer: Tokenizer, *rings: FakeRing, names: tuple[str, ...] = ("",), keys: bool = False
) -> list[CompletionService]:
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(KEYS.get, Tenant()) if keys else None
    shared = SharedState(None, SharedStateMetrics(metrics.registry))
    return [
        CompletionService(
            ring,
            tokenizer,
            ApiSettings(),
            metrics,
            shared,
            names=(name,) if name else (),
            authentication=authentication,
        )
        for ring, name in zip(rings, names, strict=True)
    ]


def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


def client(
    tokenizer: Tokenizer, *, local: bool = True, keys: bool = False, origins: tuple[str, ...] = ()
) -> httpx.AsyncClient:
    app = app_for(*services(tokenizer, ring(), keys=keys), cors=Cors(origins), local=local)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


class TestPages:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example", ""]
    )
    async def test_a_name_that_was_bent_here(self, tokenizer: Tokenizer, path: str, host: str) -> None:
        async with client(tokenizer) as http:
            answer = await http.get(path, headers={"host": host})
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("host_not_allowed", "host")
            assert "--allowed-origins" in error["message"] and "--api-keys" in error["message"]
            assert answer.headers["x-request-id"]
            refused = await http.get("/metrics")
            assert 'baton_http_refused_total{reason="host"} 1.0' in refused.text

    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1",
            "127.0.0.1:1",
            "127.9.9.9:8000",
            "localhost:3000",
            "LOCALHOST",
            "[::1]:8000",
            "a.localhost",
        ],
    )
    async def test_this_machines_names(self, tokenizer: Tokenizer, host: str) -> None:
        async with client(tokenizer) as http:
            assert (await http.get("/version", headers={"host": host})).status_code == 200

    @pytest.mark.parametrize(
        "origin",
        ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "file://", "http://["],
    )
    async def test_a_page_of_another_origin(self, tokenizer: Tokenizer, origin: str) -> None:
        async with client(tokenizer) as http:
            answer = await http.post("/v1/messages", json={}, headers={"origin": origin})
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
            page = (await http.get("/metrics")).text
            assert 'baton_http_refused_total{reason="origin"} 1.0' in page

    async def test_its_own_page(self, tokenizer: Tokenizer) -> None:
        async with client(tokenizer) as http:
            answer = await http.get("/version", headers={"origin": "http://127.0.0.1:8000"})
            assert answer.status_code == 200

    async def test_allowed_origins(self, tokenizer: Tokenizer) -> None:
        async with client(tokenizer, origins=("https://chat.example",)) as http:
            for headers in (
                {"origin": "https://chat.example"},
                {"host": "chat.example"},  # a proxy that passes the name on
                {"host": "chat.example", "origin": "https://chat.example"},
            ):
                assert (await http.get("/version", headers=headers)).status_code == 200
            for headers in ({"origin": "http://chat.example:1"}, {"host": "other.example"}):
                assert (await http.get("/version", headers=headers)).status_code == 403
        async with client(tokenizer, origins=("*",)) as http:
            headers = {"origin": "https://evil.example", "host": "evil.example"}
            assert (await http.get("/version", headers=headers)).status_code == 200

    async def test_keys_and_other_addresses_change_nothing(self, tokenizer: Tokenizer) -> None:
        headers = {"origin": "https://evil.example", "host": "evil.example"}
        async with client(tokenizer, keys=True) as http:
            assert (await http.get("/version", headers=headers)).status_code == 200
            assert (await http.get("/v1/models", headers=headers)).status_code == 401
        async with client(tokenizer, local=False) as http:
            assert (await http.get("/version", headers=headers)).status_code == 200

    @pytest.mark.parametrize(
        ("host", "expected"),
        [
            ("127.0.0.1", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),
            ("::", False),
            ("h", False),
        ],
    )
    def test_where_it_listens(self, host: str, expected: bool) -> None:
        assert is_loopback(host) is expected


class TestHealth:
    """With keys, of two models: one is ready, the other is not."""

    @pytest.fixture
    def http(self, tokenizer: Tokenizer) -> httpx.AsyncClient:
        bad = ring()
        bad.ready = False
        app = app_for(*services(tokenizer, ring(), bad, names=("tiny", "other"), keys=True))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")

    @pytest.mark.parametrize("key", [None, "unknown"])
    async def test_strangers_hear_a_status(self, http: httpx.AsyncClient, key: str | None) -> None:
        headers = {} if key is None else {"x-api-key": key}
        answer = await http.get("/health", headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        absent, unready = [
            await http.get(f"/health?model={name}", headers=headers) for name in ("no", "other")
        ]
        assert absent.status_code == unready.status_code == 503
        assert absent.json() == unready.json()
        assert (await http.get("/health?model=tiny", headers=headers)).json() == {"status": "ok"}

    async def test_clients_hear_of_their_models(self, http: httpx.AsyncClient) -> None:
        answer = await http.get("/health", headers={"x-api-key": "all"})
        assert answer.json()["models"] == {"tiny": "ok", "other": "No worker can take a request."}
        answer = await http.get("/health?model=no", headers={"x-api-key": "all"})
        assert answer.status_code == 404
        answer = await http.get("/health", headers={"x-api-key": "one"})
        assert answer.json() == {"status": "ok"}
        answer = await http.get("/health?model=other", headers={"x-api-key": "one"})
        assert answer.status_code == 404
        answer = await http.get("/health", headers={"x-api-key": "none"})
        assert answer.status_code == 503 and "No worker can" in answer.json()["error"]["message"]

    async def test_without_keys_nobody_is_a_stranger(self, tokenizer: Tokenizer) -> None:
        app = app_for(*services(tokenizer, ring(), ring(), names=("tiny", "other")))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            assert (await http.get("/health")).json()["models"] == {"tiny": "ok", "other": "ok"}
