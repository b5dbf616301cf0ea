"""Every field that asks for a form of the answer reaches the workers, or is refused before any work."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput, choice_text
from baton.router.api.authentication import Authentication
from baton.router.api.grammars import GrammarCheck
from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.roles import CountedByRole
from baton.telemetry.stats_collector import StatsCollector
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing
from tests.support.grpc_errors import metadata_of
from tests.support.hostile_grammars import HOSTILE, variants
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
    ({"structured_outputs": {"structural_tags": "x"}}, "structured_outputs", "unknown field structural_tags"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
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


@pytest.mark.deep
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
    """The seconds that a refusal takes; infinity where the machine was too busy for one."""
    # The one before may have been the death of the process for trials.
    warm = await client.post(COMPLETIONS, json=body(COMPLETIONS, {"guided_regex": f"w{time.monotonic()}"}))
    assert warm.status_code == 200, warm.text
    field = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}[output.kind]
    began = time.monotonic()
    response = await client.post(COMPLETIONS, json=body(COMPLETIONS, {field: output.text}))
    if response.status_code == 503:
        assert "most of it waiting" in response.text
        return math.inf
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
            params = ResolvedSampling(max_tokens=1, structured_output=form)
            assert ResolvedSampling.from_proto(params.to_proto()) == params


async def test_metrics_tell_of_grammars(service: CompletionService) -> None:
    for _ in range(2):
        await service.grammars.check("regex", StructuredOutput("regex", "metrics+"), Tenant())
    registry = CollectorRegistry()
    registry.register(StatsCollector(CountedByRole("router"), service.grammars.stats))
    page = generate_latest(registry).decode()
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    for name in (
        "baton_grammars_compiled_total",
        "baton_grammar_cache_hits_total",
        "baton_grammar_compile_seconds_total",
    ):
        assert float(samples[f'{name}{{role="router"}}']) > 0


BOMB = HOSTILE["intersected expressions"]


def bomb(number: int) -> str:
    """A grammar that is refused when it has taken all the time of a trial, each another to a cache."""
    return f"{BOMB.text}\n# {number}"


@asynccontextmanager
async def two_tenants(
    ring: FakeRing, tokenizer: Tokenizer, limits: Limits, tenant_cpu_s: float
) -> AsyncIterator[tuple[httpx.AsyncClient, CompletionService]]:
    """Clients with the keys hostile and honest."""
    tenants = {name: Client(tenant=Tenant(name, limits)) for name in ("hostile", "honest")}
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        ring, tokenizer, ApiSettings(), metrics, authentication=Authentication(tenants.get, Tenant())
    )
    service.grammars = GrammarCheck(tokenizer, service.shared, metrics, tenant_cpu_s=tenant_cpu_s)
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client, service


def refusals(service: CompletionService, tenant: str, reason: str) -> float:
    name = "baton_grammar_refusals_total"
    value = service.metrics.registry.get_sample_value(name, {"tenant": tenant, "reason": reason})
    return value or 0.0


async def ask(client: httpx.AsyncClient, tenant: str, fields: Mapping[str, object]) -> httpx.Response:
    headers = {"authorization": f"Bearer {tenant}"}
    return await client.post(COMPLETIONS, json=body(COMPLETIONS, dict(fields)), headers=headers)


async def test_a_tenant_that_has_used_up_its_trials_is_told_so_and_others_go_on(
    ring: FakeRing, tokenizer: Tokenizer
) -> None:
    async with two_tenants(ring, tokenizer, Limits(), 1.5) as (client, service):
        for tenant in ("hostile", "honest"):
            assert (await ask(client, tenant, {"guided_json_object": True})).status_code == 200
        bombs = [
            asyncio.create_task(ask(client, "hostile", {"guided_grammar": bomb(number)}))
            for number in range(6)
        ]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        answer = await ask(client, "honest", {"guided_json": SCHEMA})
        assert answer.status_code == 200 and time.monotonic() - began < 2.0
        answers = [await each for each in bombs]
        statuses = [each.status_code for each in answers]
        assert 429 in statuses and set(statuses) <= {400, 429, 503}, "503: a machine too busy to tell"
        refused = answers[statuses.index(429)]
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["param"] == "guided_grammar" and "1.5 s a minute" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert (await ask(client, "hostile", {"guided_json_object": True})).status_code == 200
        assert (await ask(client, "honest", {"guided_regex": "[a-c]+"})).status_code == 200
        for reason, status in (("invalid", 400), ("tenant", 429), ("overall", 503)):
            assert refusals(service, "hostile", reason) == statuses.count(status)
            assert refusals(service, "honest", reason) == 0


async def test_a_request_that_is_refused_for_its_form_counts_as_one_and_once(
    ring: FakeRing, tokenizer: Tokenizer
) -> None:
    limits = Limits(requests_per_minute=4, tokens_per_minute=100)
    async with two_tenants(ring, tokenizer, limits, 60.0) as (client, service):
        first = await ask(client, "hostile", {"guided_regex": "a+"})
        assert first.headers["x-ratelimit-remaining-requests"] == "3", "what is good is counted once"
        for number in range(2):
            assert (await ask(client, "hostile", {"guided_regex": f"({number}"})).status_code == 400
        last = await ask(client, "hostile", {"guided_regex": "a+"})
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(client, "hostile", {"guided_regex": "(a"})).status_code == 400
        compiled = service.grammars.stats()
        for fields in ({"guided_regex": "(b"}, {"guided_regex": "b+"}):
            refused = await ask(client, "hostile", fields)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"].startswith(
                "The limit of hostile is reached: 4 requests per minute."
            )
            assert 50 <= int(refused.headers["retry-after"]) <= 61
        assert service.grammars.stats() == compiled, "nothing is tried out any more"
        assert refusals(service, "hostile", "requests") == 2
        assert (await ask(client, "honest", {"guided_regex": "a+"})).status_code == 200
