"""Several models behind one router, by the names that clients use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.process.options import ConfigError
from baton.router.api.catalogue import Catalogue
from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.http.server.cors import Cors
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.config import RouterConfig
from baton.router.models_file import each_model
from baton.router.shared.state import SharedState
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.api_server import serving_app
from tests.support.deep import all_deep_but
from tests.support.fake_ring import MODEL, FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rings(tokenizer: Tokenizer) -> dict[str, FakeRing]:
    """Each answers with its own name."""
    return {
        name: FakeRing(
            lambda call, name=name: tokenizer.encode(name),  # type: ignore[misc]
            model=dataclasses.replace(MODEL, name=name),
            ends=True,
        )
        for name in ("first", "second")
    }


@pytest.fixture
def services(rings: dict[str, FakeRing], tokenizer: Tokenizer) -> list[CompletionService]:
    metrics = RouterMetrics(CollectorRegistry())
    shared = SharedState(None, SharedStateMetrics(metrics.registry))
    return [
        CompletionService(ring, tokenizer, ApiSettings(), metrics, shared, names=(name, f"{name}-alias"))
        for name, ring in rings.items()
    ]


@pytest.fixture
async def api(services: list[CompletionService]) -> AsyncIterator[httpx.AsyncClient]:
    async with serving_app(app_for(*services)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 50},
}


@pytest.mark.parametrize("path", all_deep_but(1, BODIES))
@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("first", "first"),
        ("first-alias", "first"),
        ("second", "second"),
        ("second-alias", "second"),
        (None, "first"),
        ("", "first"),
    ],
)
async def test_a_model_is_picked_by_its_names(
    api: httpx.AsyncClient, path: str, asked: str | None, answers: str
) -> None:
    """An answer tells the model's own name, as vLLM's do."""
    answer = await api.post(path, json={**BODIES[path], "model": asked})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == answers and f'"{answers}"' in answer.text


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/v1/messages/count_tokens"])
async def test_an_unknown_name(api: httpx.AsyncClient, path: str) -> None:
    body = BODIES.get(path, {"prompt": "x"} if path == "/tokenize" else CHAT)
    answer = await api.post(path, json={**body, "model": "third"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == 'The model "third" does not exist; this server has "first", "second".'


async def test_what_is_listed(api: httpx.AsyncClient) -> None:
    entries = (await api.get("/v1/models")).json()["data"]
    assert [(entry["id"], entry["root"]) for entry in entries] == [
        ("first", "first"),
        ("first-alias", "first"),
        ("second", "second"),
        ("second-alias", "second"),
    ]
    assert (await api.get("/v1/models/second-alias")).json()["root"] == "second"
    assert (await api.get("/v1/models/third")).status_code == 404


async def test_one_ready_model_is_enough(api: httpx.AsyncClient, rings: dict[str, FakeRing]) -> None:
    assert (await api.get("/health")).json() == {"status": "ok", "models": {"first": "ok", "second": "ok"}}
    rings["first"].unlinked = {"verify": 2}
    assert (await api.get("/health")).json()["unlinked_pairs"] == {"verify": 2}
    assert (await api.get("/health?model=first")).json() == {"status": "ok", "unlinked_pairs": {"verify": 2}}
    assert (await api.get("/health?model=second")).json() == {"status": "ok"}
    rings["first"].unlinked = {}
    rings["second"].ready = False
    told = (await api.get("/health")).json()["models"]
    assert told == {"first": "ok", "second": "No worker can take a request."}
    assert (await api.get("/health?model=second")).status_code == 503
    assert (await api.get("/health?model=first-alias")).status_code == 200
    rings["first"].model = None
    assert (await api.get("/health")).status_code == 503
    answer = await api.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"


async def test_grpc_picks_alike(services: list[CompletionService]) -> None:
    server = grpc.aio.server()
    add_services(server, *services)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = InferenceStub(channel)
            for asked, answers in (("", "first"), ("second-alias", "second")):
                request = pb.GenerateRequest(model=asked, text="x")
                text = "".join([response.text async for response in stub.Generate(request)])
                assert text == answers
            listed = await stub.ListModels(pb.ListModelsRequest())
            assert list(listed.models) == ["first", "first-alias", "second", "second-alias"]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [_ async for _ in stub.Generate(pb.GenerateRequest(model="third", text="x"))]
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop(0)


def test_names_are_no_ones_twice(services: list[CompletionService]) -> None:
    with pytest.raises(ValueError, match="same name"):
        Catalogue([services[0], services[0]])
    with pytest.raises(ValueError, match="at least one"):
        Catalogue([])


async def test_pages_of_other_origins(services: list[CompletionService]) -> None:
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for cors, allowed in ((Cors(), None), (Cors(("https://a.example",), True), "https://a.example")):
        app = app_for(*services, cors=cors)
        async with serving_app(app) as url, httpx.AsyncClient(base_url=url) as client:
            before = await client.options("/v1/completions", headers=asks)
            answer = await client.post("/v1/completions", json={"prompt": 1}, headers=asks)
            other = await client.get("/health", headers={"origin": "https://b.example"})
        assert before.headers.get("access-control-allow-origin") == allowed
        assert answer.status_code == 400  # an error can be read, too
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert "access-control-allow-origin" not in other.headers
        if allowed:
            assert before.status_code == 200
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


# -- the file


KEY = "a cluster key of tests"
ROUTER = RouterConfig(workers=("127.0.0.1:1",))
ENTRY = {"name": "a", "model": "org/a", "workers": ["a:1"]}


def read(path: Path, entries: object) -> list[RouterConfig]:
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return each_model(RouterConfig(models=str(path), max_n=3, cluster_key=KEY))


def test_a_file_of_models(tmp_path: Path) -> None:
    text = """
    - name: qwen
      aliases: [q, gpt-4]
      model: org/qwen
      workers: [10.0.0.1:9000, 10.0.0.2:9000]
    - {name: llama, model: /models/llama, kubernetes_selector: model=llama, tool_call_parser: llama3_json}
    """
    qwen, llama = read(tmp_path / "models.yaml", text)
    assert qwen.model_names == ("qwen", "q", "gpt-4") and qwen.model == "org/qwen"
    assert qwen.workers == ("10.0.0.1:9000", "10.0.0.2:9000") and qwen.discovery == "static"
    assert (llama.discovery, llama.kubernetes_selector, llama.workers) == ("kubernetes", "model=llama", ())
    assert (qwen.tool_call_parser, llama.tool_call_parser) == ("auto", "llama3_json")
    assert qwen.max_n == llama.max_n == 3
    [alone] = read(tmp_path / "models.json", [ENTRY])
    assert alone.model_name == "a"
    assert each_model(ROUTER) == [ROUTER]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "names no model"),
        ({}, "Expected `array`"),
        ("[", "did not find expected node content"),
        ([{"name": "a"}], "missing required field `model`"),
        ([{**ENTRY, "worker": []}], "unknown field `worker`"),
        ([{**ENTRY, "name": ""}], "[0] has an empty name"),
        ([{**ENTRY, "workers": []}], "either workers or a kubernetes_selector"),
        ([{**ENTRY, "kubernetes_selector": "a=b"}], "either workers or a kubernetes_selector"),
        ([{**ENTRY, "workers": ["a"]}], "'a' is not an address"),
        ([{**ENTRY, "tool_call_parser": "x"}], "tool_call_parser: must be one of"),
        ([ENTRY, {**ENTRY, "name": "b", "aliases": ["a"]}], "'a' names more than one model"),
        ([{"name": "a", "model": "demo", "kubernetes_selector": ""}], "must not be empty"),
    ],
)
def test_a_file_that_cannot_work(tmp_path: Path, entries: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "models.yaml", entries)
    assert said in str(refused.value) and str(refused.value).startswith("--models: ")


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for fields, option in (
        ({"models": "m", "workers": ("a:1",)}, "worker"),
        ({"models": "m", "served_model_name": ("a",)}, "served_model_name"),
        ({"models": "m", "discovery": "kubernetes"}, "discovery"),
        ({"workers": ("a:1",), "served_model_name": ("a", "a")}, "served_model_name"),
        ({"workers": ("a:1",), "served_model_name": ("",)}, "served_model_name"),
        ({"workers": ("a:1",), "allow_credentials": True}, "allow_credentials"),
    ):
        with pytest.raises(ConfigError) as refused:
            RouterConfig(**fields)
        assert refused.value.option == option
    with pytest.raises(ConfigError, match="cannot read"):
        each_model(RouterConfig(models=str(tmp_path / "none.yaml")))


async def test_metrics_tell_models_apart_and_clients_make_up_no_labels(api: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    for model in ("first", "first-alias", "second", "invented"):
        await api.post("/v1/completions", json={**body, "model": model})
    await api.get("/invented/path")
    await api.get("/v1/models/invented")
    page = (await api.get("/metrics")).text
    assert 'baton_e2e_latency_seconds_count{model="first"} 2.0' in page
    assert 'baton_e2e_latency_seconds_count{model="second"} 1.0' in page
    assert "invented" not in page
    assert "alias" not in page
