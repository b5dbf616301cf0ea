"""API keys: the file, what it refuses, following it, and what a stranger is told."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.cli import main
from baton.process.options import ConfigError
from baton.request.errors import RequestError
from baton.router.api.authentication import Authentication
from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.priority import resolve_priority
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.security.keys import KeyFile, KeysError, entry_line, new_key, parse
from baton.router.shared.limits import Limits, Tenant
from baton.router.shared.state import SharedState
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving_app
from tests.support.fake_ring import MODEL, FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

BODY: dict[str, object] = {"prompt": [5, 6, 7], "max_tokens": 4}
DEFAULTS = Limits(requests_per_minute=60)


def written(path: Path, *lines: str, tenants: str = "{}") -> Path:
    path.write_text("\n".join([f"tenants: {tenants}", "keys:", *lines]))
    return path


def with_fields(line: str, **fields: object) -> str:
    """A line of the file with more in it."""
    return "- " + json.dumps({**json.loads(line.removeprefix("- ")), **fields})


class TestFile:
    def test_keys_lead_to_tenants(self) -> None:
        key, other = new_key(), new_key()
        lines = [
            with_fields(entry_line(key, "a", "acme"), models=["m"], most_urgent=-1),
            entry_line(other, "b", "b"),
        ]
        text = "\n".join(["tenants: {acme: {weight: 2, tokens_per_minute: 9}}", "keys:", *lines])
        keys = parse(text.encode(), DEFAULTS)
        tenant = Tenant("acme", Limits(requests_per_minute=60, tokens_per_minute=9), 2.0)
        assert keys.find(key) == Client(tenant=tenant, key="a", models=frozenset({"m"}), most_urgent=-1)
        found = keys.find(other)
        assert found is not None and found.tenant == Tenant("b", DEFAULTS)
        assert keys.find(key[:-1]) is None and keys.find("") is None and keys.find("x" * 10_000) is None

    def test_json_is_read_too(self) -> None:
        key = new_key()
        document = {"keys": [json.loads(entry_line(key, "a", "t").removeprefix("- "))]}
        assert parse(json.dumps(document).encode(), DEFAULTS).find(key) is not None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hash": "secret"}, r"keys\[0\].hash must be sha256:"),
            ({"name": "a b"}, r"keys\[0\].name must be 1 to 64"),
            ({"tenant": 3}, r"Expected `str`, got `int` - at `\$.keys\[0\].tenant`"),
            ({"weight": 3}, "unknown field `weight`"),
            ({"most_urgent": 101}, r"keys\[0\].most_urgent is 101"),
        ],
    )
    def test_bad_entries_are_told_by_name(self, change: dict[str, object], message: str) -> None:
        line = with_fields(entry_line(new_key(), "a", "t"), **change)
        with pytest.raises(KeysError, match=message) as refused:
            parse(f"keys:\n{line}".encode(), DEFAULTS)
        assert "secret" not in str(refused.value)

    @pytest.mark.parametrize(
        ("tenants", "message"),
        [
            ("{t: {weight: 0}}", "tenants.t.weight is 0"),
            ("{t: {tokens_per_day: 0}}", "tenants.t.tokens_per_day is 0"),
            ("[", "neither YAML nor JSON"),
        ],
    )
    def test_bad_tenants_are_told_by_name(self, tenants: str, message: str) -> None:
        with pytest.raises(KeysError, match=message):
            parse(f"tenants: {tenants}\nkeys: []".encode(), DEFAULTS)

    def test_neither_names_nor_keys_come_twice(self) -> None:
        key = new_key()
        for names, what in ((("a", "a"), "name"), (("a", "b"), "hash")):
            lines = "\n".join(entry_line(key, name, "t") for name in names)
            with pytest.raises(KeysError, match=what):
                parse(f"keys:\n{lines}".encode(), DEFAULTS)

    def test_a_key_is_no_name(self) -> None:
        with pytest.raises(KeysError, match="looks like a key"):
            entry_line(new_key(), new_key(), "t")

    def test_a_router_does_not_start_without_its_keys(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--api-keys: .*cannot be read"):
            KeyFile(str(tmp_path / "none"), DEFAULTS)


class TestFollowing:
    def test_a_key_comes_and_goes(self, tmp_path: Path) -> None:
        first, second = new_key(), new_key()
        path = written(tmp_path / "keys.yaml", entry_line(first, "a", "t"))
        keys = KeyFile(str(path), DEFAULTS)
        assert keys.find(first) and not keys.find(second)
        written(path, entry_line(second, "bb", "t"))
        keys.follow()
        assert keys.find(second) and not keys.find(first)

    def test_a_swapped_volume_is_noticed(self, tmp_path: Path) -> None:
        """As Kubernetes does it: a link to a directory, replaced at once."""
        first, second = new_key(), new_key()
        for version, key in (("1", first), ("2", second)):
            (tmp_path / version).mkdir()
            written(tmp_path / version / "keys", entry_line(key, "a", "t"))
        data = tmp_path / "..data"
        data.symlink_to(tmp_path / "1")
        (tmp_path / "keys").symlink_to(data / "keys")
        keys = KeyFile(str(tmp_path / "keys"), DEFAULTS)
        (tmp_path / "next").symlink_to(tmp_path / "2")
        (tmp_path / "next").rename(data)
        keys.follow()
        assert keys.find(second) and not keys.find(first)

    def test_what_cannot_be_used_changes_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        key = new_key()
        path = written(tmp_path / "keys", entry_line(key, "a", "t"))
        keys = KeyFile(str(path), DEFAULTS)
        path.write_text(f"keys: [{key}")
        keys.follow()
        path.unlink()
        keys.follow()
        assert keys.find(key)
        assert "cannot be used" in caplog.text and key not in caplog.text


def test_the_command_prints_a_key_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    main.commands(["keys", "create", "--tenant", "acme", "--name", "ci"], standalone_mode=False)
    key, line = (text.split(": ", 1)[1].strip() for text in capsys.readouterr().out.splitlines())
    found = parse(f"keys:\n{line}".encode(), DEFAULTS).find(key)
    assert found is not None and (found.key, found.tenant.name) == ("ci", "acme")
    assert key not in line


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


KEY, OTHER = new_key(), new_key()


def service_of(ring: FakeRing, tokenizer: Tokenizer) -> CompletionService:
    lines = [
        entry_line(KEY, "a", "acme"),
        with_fields(entry_line(OTHER, "b", "b"), models=["big"], most_urgent=1),
    ]
    keys = parse("\n".join(["keys:", *lines]).encode(), Limits())
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(keys.find, Tenant())
    return CompletionService(ring, tokenizer, ApiSettings(), metrics, authentication=authentication)


@asynccontextmanager
async def client_of(ring: FakeRing, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    service = service_of(ring, tokenizer)
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


async def test_strangers_are_told_how_to_ask(
    ring: FakeRing, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "baton")
    guess = new_key()
    async with client_of(ring, tokenizer) as client:
        for headers in (
            {},
            {"authorization": f"Bearer {guess}"},
            {"x-api-key": guess},
            {"authorization": guess},
        ):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/nothing"):
                refused = await client.post(path, json=BODY, headers=headers)
                error = refused.json()["error"]
                assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert guess not in refused.text
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        for path in ("/health", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert not ring.calls
    assert guess not in metrics and guess not in caplog.text


def test_a_keys_least_priority_holds_where_priorities_do() -> None:
    client = Client(tenant=Tenant("t"), key="k", most_urgent=5)
    heeds = dataclasses.replace(MODEL, takes_priorities=True)
    first_come = dataclasses.replace(MODEL, takes_priorities=False)
    assert resolve_priority(None, None, heeds, started=0.0, client=client).level == 5
    assert resolve_priority(None, None, first_come, started=0.0, client=client).level == 0
    assert resolve_priority(0, None, first_come, started=0.0, client=client).level == 0
    with pytest.raises(RequestError, match="priority is 3, but this key's requests may have 5 at least"):
        resolve_priority(3, None, heeds, started=0.0, client=client)


async def test_where_there_are_keys_no_stranger_to_a_model_hears_its_name(tokenizer: Tokenizer) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(lambda key: Client(tenant=Tenant("t"), key="k"), Tenant())
    services = [
        CompletionService(
            FakeRing(lambda call: [10]),
            tokenizer,
            ApiSettings(),
            metrics,
            SharedState(None, SharedStateMetrics(metrics.registry if first else CollectorRegistry())),
            names=(name,),
            authentication=authentication,
        )
        for first, name in ((True, "hidden"), (False, "secret"))
    ]
    async with serving_app(app_for(*services)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        asked = {**BODY, "model": "other"}
        refused = await client.post("/v1/completions", json=asked, headers={"x-api-key": "k"})
        assert refused.status_code == 404 and "other" in refused.text
        assert "hidden" not in refused.text and "secret" not in refused.text


NEW_SHAPES: dict[str, dict[str, object]] = {
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", NEW_SHAPES)
async def test_all_shapes_of_the_api_want_a_key(path: str, ring: FakeRing, tokenizer: Tokenizer) -> None:
    body = {**NEW_SHAPES[path], "model": "tiny"}
    async with client_of(ring, tokenizer) as client:
        refused = await client.post(path, json=body, headers={"x-api-key": new_key()})
        assert refused.status_code == 401
        kind = refused.json()["error"]["type"]
        assert kind == ("invalid_request_error" if path == "/v1/responses" else "authentication_error")
        assert (await client.post(path, json=body, headers={"x-api-key": OTHER})).status_code == 404
        assert not ring.calls
        answered = await client.post(path, json=body, headers={"x-api-key": KEY})
        assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("allowed", ["real", "alias"])
async def test_a_key_for_one_name_of_a_model_opens_the_model(
    allowed: str, ring: FakeRing, tokenizer: Tokenizer
) -> None:
    line = with_fields(entry_line(KEY, "a", "acme"), models=[allowed])
    keys = parse(f"keys:\n{line}".encode(), Limits())
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        ring,
        tokenizer,
        ApiSettings(),
        metrics,
        names=("real", "alias"),
        authentication=Authentication(keys.find, Tenant()),
    )
    headers = {"x-api-key": KEY}
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        for asked in ("real", "alias"):
            answered = await client.post("/v1/completions", json={**BODY, "model": asked}, headers=headers)
            assert answered.status_code == 200, answered.text
        listed = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert [model["id"] for model in listed] == ["real", "alias"]


async def test_a_key_opens_the_models_it_names(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with client_of(ring, tokenizer) as client:
        for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
            assert len((await client.get("/v1/models", headers=headers)).json()["data"]) == 1
        headers = {"x-api-key": OTHER}
        for asked in (BODY, {**BODY, "model": "tiny"}):
            refused = await client.post("/v1/completions", json=asked, headers=headers)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
        assert (await client.get("/v1/models", headers=headers)).json()["data"] == []
        assert (await client.get("/v1/models/tiny", headers=headers)).status_code == 404


async def test_over_grpc_the_key_is_metadata(ring: FakeRing, tokenizer: Tokenizer) -> None:
    server = grpc.aio.server()
    add_services(server, service_of(ring, tokenizer))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), params=pb.SamplingParams(max_tokens=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer no"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {OTHER}"),), grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                _ = [response async for response in stub.Generate(asked, metadata=metadata)]
            assert refused.value.code() == code
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(pb.ListModelsRequest())
        mine = (("authorization", f"Bearer {KEY}"),)
        assert [response async for response in stub.Generate(asked, metadata=mine)]
        assert list((await stub.ListModels(pb.ListModelsRequest(), metadata=mine)).models) == ["tiny"]
    await server.stop(0)


async def test_an_endpoint_that_forgets_who_asks_answers_nobody(ring: FakeRing, tokenizer: Tokenizer) -> None:
    from baton.core.sampling_params import ResolvedSampling
    from baton.router.api.errors import ApiError
    from baton.router.api.job import Job
    from tests.support.fake_ring import MODEL

    params = ResolvedSampling(max_tokens=1)
    job = Job(request_id="r", endpoint="e", started=0.0, model=MODEL, prompts=[[1]], params=params)
    with pytest.raises(ApiError, match="An API key is needed"):
        await anext(service_of(ring, tokenizer).run(job))
    assert not ring.calls


def test_salts_are_a_tenants_own() -> None:
    one, other = (Client(tenant=Tenant(name), key="k") for name in ("a", "b"))
    nobody = Client(tenant=Tenant())
    salts = [who.cache_salt(given) for who in (one, other, nobody) for given in (None, "s", "t")]
    assert len(set(salts)) == len(salts)
    assert nobody.cache_salt(None) == b""
    assert Client(tenant=Tenant("a"), key="k2").cache_salt("s") == one.cache_salt("s")
