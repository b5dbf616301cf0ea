"""Every field that asks for a form of the answer reaches the workers, or is refused before any work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.router.api import ApiSettings
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.grpc_api import add_services
from baton.router.shared.limits import Tenant
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput, choice_text
from baton.telemetry.grammar import GrammarCollector
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.roles import CountedByRole
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing
from tests.support.grpc_errors import metadata_of
from tests.support.hostile_grammars import variants
from tests.support.tiny_tokenizers import byte_level_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TEXT = msgspec.json.encode(SCHEMA).decode()
LARK, GBNF = 'start: "x"+', 'root ::= "a" root | "b"'

FORMS: list[tuple[dict[str, object], StructuredOutput | None]] = [
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
            }
        },
        StructuredOutput("json_schema", TEXT),
    ),
    ({"structured_outputs": None}, None),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutput("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT}}, StructuredOutput("json_schema", TEXT)),
    ({"structured_outputs": {"json": True}}, StructuredOutput("json_schema", "true")),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
    ({"structured_outputs": {"regex": r"\d+"}}, StructuredOutput("regex", r"\d+")),
    ({"structured_outputs": {"choice": ["é", "b"]}}, StructuredOutput("choice", choice_text(["é", "b"]))),
    ({"structured_outputs": {"grammar": LARK}}, StructuredOutput("grammar", LARK)),
    ({"guided_json": SCHEMA}, StructuredOutput("json_schema", TEXT)),
    ({"guided_json": TEXT, "guided_regex": None}, StructuredOutput("json_schema", TEXT)),
    ({"guided_json_object": True}, StructuredOutput("json_object")),
    ({"guided_json_object": False}, None),
    ({"guided_regex": r"\d+", "response_format": {"type": "text"}}, StructuredOutput("regex", r"\d+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutput("choice", choice_text(["a", "b"]))),
    ({"guided_grammar": GBNF}, StructuredOutput("grammar", GBNF)),
]

BAD: list[tuple[dict[str, object], str, str]] = [
    # The fields, the param that is named, a part of the message.
    ({"response_format": "json"}, "response_format", '"json"'),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", 'not "yaml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
    (
        {"response_format": {"type": "text", "json_schema": {}}},
        "response_format.json_schema",
        "needs the type",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
        "response_format",
        "strng",
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field schema"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not regex and choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "unknown field structural_tag"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "allowed are 1 to 4096"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "1"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
    ({"guided_json": 7}, "guided_json", "7"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
    (
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
        "guided_choice",
        "response_format and guided_choice",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


@pytest.fixture(scope="module")
def service(ring: FakeRing, tokenizer: Tokenizer) -> CompletionService:
    return CompletionService(ring, tokenizer, ApiSettings(), RouterMetrics(CollectorRegistry()))


@pytest.fixture
async def client(ring: FakeRing, service: CompletionService) -> AsyncIterator[httpx.AsyncClient]:
    ring.calls.clear()
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


def body(path: str, fields: dict[str, object]) -> dict[str, object]:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    return {**prompt, "max_tokens": 3, **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_field_becomes_a_structured_output(
    client: httpx.AsyncClient, ring: FakeRing, path: str
) -> None:
    for fields, expected in FORMS:
        for stream in (False, True):
            response = await client.post(path, json=body(path, {**fields, "stream": stream}))
            assert response.status_code == 200, (fields, response.text)
            assert ring.calls[-1].params.structured_output == expected, fields


async def test_what_cannot_be_followed_is_refused_before_any_work(
    client: httpx.AsyncClient, ring: FakeRing
) -> None:
    for path in (COMPLETIONS, CHAT):
        for fields, param, part in BAD:
            response = await client.post(path, json=body(path, fields))
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, (fields, error)
            assert part in error["message"], (fields, error)
    assert not ring.calls


async def refused_in(client: httpx.AsyncClient, output: StructuredOutput) -> float:
    """Seconds."""
    # The one before may have been the death of the process for trials.
    warm = await client.post(COMPLETIONS, json=body(COMPLETIONS, {"guided_regex": f"w{time.monotonic()}"}))
    assert warm.status_code == 200, warm.text
    field = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}[output.kind]
    began = time.monotonic()
    response = await client.post(COMPLETIONS, json=body(COMPLETIONS, {field: output.text}))
    assert response.status_code in (400, 413), response.text
    return time.monotonic() - began


async def test_hostile_ones_are_refused_within_a_second(client: httpx.AsyncClient) -> None:
    for name in ("deep schema", "deep rules", "rules that double", "intersected expressions", "10 MB regex"):
        for output in variants(name):
            seconds = await refused_in(client, output)
            if seconds < 1.0:
                break
        assert seconds < 1.0, name


async def test_grpc(ring: FakeRing, service: CompletionService) -> None:
    ring.calls.clear()
    server = grpc.aio.server()
    add_services(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for output in (
                StructuredOutput("json_object"),
                StructuredOutput("json_schema", TEXT),
                StructuredOutput("regex", "a+"),
                StructuredOutput("choice", choice_text(["a", "é"])),
                StructuredOutput("grammar", GBNF),
            ):
                params = pb.SamplingParams(max_tokens=3, structured_output=output.to_proto())
                async for _ in stub.Generate(pb.GenerateRequest(text="the fox", params=params)):
                    pass
                assert ring.calls[-1].params.structured_output == output
            params.structured_output.CopyFrom(pb.StructuredOutput(regex="("))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(pb.GenerateRequest(text="the fox", params=params)):
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "unclosed group" in str(refused.value.details())
            assert metadata_of(refused.value)["baton-error-param"] == "structured_output"
    finally:
        await server.stop(0)


def test_the_message_between_services_keeps_it() -> None:
    for _, output in FORMS:
        for form in (output, output and replace(output, around='start: "a" @form')):
            params = SamplingParams(max_tokens=1, structured_output=form)
            assert SamplingParams.from_proto(params.to_proto()) == params


async def test_metrics_tell_of_grammars(service: CompletionService) -> None:
    for _ in range(2):
        await service.grammars.check("regex", StructuredOutput("regex", "metrics+"), Tenant())
    registry = CollectorRegistry()
    registry.register(GrammarCollector(CountedByRole("router"), service.grammars.stats))
    page = generate_latest(registry).decode()
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    for name in (
        "baton_grammars_compiled_total",
        "baton_grammar_cache_hits_total",
        "baton_grammar_compile_seconds_total",
    ):
        assert float(samples[f'{name}{{role="router"}}']) > 0
