"""What a ring writes under guidance is what was asked for, by validators that know nothing of guidance."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TypeVar

import grpc
import httpx
import jsonschema
import openai
import pytest

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.v1 import inference_pb2, inference_pb2_grpc
from baton.v1 import worker_pb2 as pb
from tests.support.bare_router import BareRouter
from tests.support.clients import Answer, RingClient
from tests.support.generated_schemas import Schema, schema_of_depth
from tests.support.grammar_cases import CASES
from tests.support.hostile_grammars import HOSTILE
from tests.support.ring import Ring, running_ring

pytestmark = pytest.mark.beside

Result = TypeVar("Result")

NUM_SCHEMAS = 200
AT_ONCE = 48
PROMPT = "Ada is 36 years old and lives in London. As data:\n"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """Decode has room for a part of the requests only, so that some are preempted. On a slow machine those
    that wait do so for long, and are not to be refused for it."""
    narrow, patient = ("--num-blocks", "40"), ("--max-queue-wait", "600")
    tmp = tmp_path_factory.mktemp("ring")
    with running_ring(tmp, decode_options=narrow, router_options=patient) as ring:
        yield ring


@pytest.fixture
async def client(ring: Ring) -> AsyncIterator[RingClient]:
    async with RingClient(ring.url, "demo") as client:
        yield client
    ring.wait_idle()


async def some_at_once(asked: Sequence[Awaitable[Result]]) -> list[Result]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(awaitable: Awaitable[Result]) -> Result:
        async with room:
            return await awaitable

    return await asyncio.gather(*map(one, asked))


def fields(seed: int, **structured: object) -> dict[str, object]:
    """Nine in ten answers of the demo model end within 150 tokens, but whether a few more or fewer do is up
    to the seeds: these are some that leave room."""
    temperature = (0.0, 0.7, 1.0)[seed % 3]
    return {
        "max_tokens": 150,
        "seed": 1000 + seed,
        "temperature": temperature,
        "structured_outputs": structured,
    }


def metric(ring: Ring, role: str, name: str) -> float:
    [worker] = ring.of_role(role)
    return worker.metrics()[f'{name}{{role="{role}"}}']


@pytest.mark.deep
async def test_generated_schemas(client: RingClient, ring: Ring) -> None:
    rng = random.Random(7)
    schemas: list[Schema] = [schema_of_depth(1 + i // 40, rng) for i in range(NUM_SCHEMAS)]
    preempted = metric(ring, "decode", "baton_preemptions_total")
    answers = await some_at_once(
        [
            (client.stream if i % 2 else client.complete)(PROMPT, **fields(i, json=schema))
            for i, schema in enumerate(schemas)
        ]
    )
    finished = [(s, a) for s, a in zip(schemas, answers, strict=True) if a.finish_reason == "stop"]
    for schema, answer in finished:
        jsonschema.Draft202012Validator.check_schema(schema)
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(answer.text))
    unfinished = [(s, a.text) for s, a in zip(schemas, answers, strict=True) if a.finish_reason != "stop"]
    assert len(finished) >= 0.9 * NUM_SCHEMAS, unfinished
    assert metric(ring, "decode", "baton_preemptions_total") > preempted
    assert metric(ring, "prefill", "baton_guided_masks_total") >= NUM_SCHEMAS
    assert metric(ring, "decode", "baton_guided_masks_total") >= sum(len(a.token_ids) - 1 for a in answers)


async def test_grammars(client: RingClient) -> None:
    assert len(CASES) == 30
    answers = await some_at_once(
        [client.complete(PROMPT, **fields(i, grammar=case.text)) for i, case in enumerate(CASES)]
    )
    finished = [(c, a) for c, a in zip(CASES, answers, strict=True) if a.finish_reason == "stop"]
    assert [(case.name, answer.text) for case, answer in finished if not case.is_valid(answer.text)] == []
    assert len(finished) >= 0.9 * len(CASES)


async def test_each_is_what_it_is_alone(client: RingClient) -> None:
    """In a full ring whose decode worker preempts, and streamed or not."""
    rng = random.Random(3)
    asked = [fields(i, json=schema_of_depth(2, rng)) for i in range(6)]
    asked += [fields(i, grammar=case.text) for i, case in enumerate(CASES[::5])]
    alone = [await client.complete(PROMPT, **each) for each in asked]
    together = await some_at_once([client.stream(PROMPT, **each) for each in asked * 2])
    assert [a.token_ids for a in together] == [a.token_ids for a in alone] * 2


async def test_a_worker_goes_on_from_delivered_tokens(client: RingClient, ring: Ring) -> None:
    """What a router asks of a worker when the one before it is lost."""
    schema: Schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 3,
    }
    output = StructuredOutput("json_schema", json.dumps(schema))
    params = ResolvedSampling(max_tokens=250, seed=5, temperature=0.8, structured_output=output)
    prompt = list(range(50, 90))
    whole = await client.complete(
        prompt, max_tokens=250, seed=5, temperature=0.8, structured_outputs={"json": schema}
    )
    assert whole.finish_reason == "stop"
    router = BareRouter(ring.of_role("decode")[0])
    try:
        await router.greet()
        for attempt, cut in enumerate((1, len(whole.token_ids) // 2, len(whole.token_ids) - 1)):
            given = whole.token_ids[:cut]
            await router.submit(f"{cut}", attempt, prompt, params, given)
            token_ids, end = await router.answer(f"{cut}")
            assert [*given, *token_ids] == whole.token_ids
            assert end.finish_reason == inference_pb2.FINISH_REASON_STOP
    finally:
        await router.close()


async def test_a_worker_trusts_nobody(client: RingClient, ring: Ring) -> None:
    """Hostile grammars that no router has checked are refused by the worker, and its others go on."""
    alone = await client.complete(PROMPT, max_tokens=150, temperature=0)
    beside = asyncio.create_task(client.stream(PROMPT, max_tokens=150, temperature=0))
    router = BareRouter(ring.of_role("decode")[0])
    try:
        await router.greet()
        # One of 10 MB would end the stream: no message is as long, in however many parts.
        hostile = {**HOSTILE, "7 MB regex": StructuredOutput("regex", "x" * 7_000_000)}
        for name in ("intersected expressions", "deep rules", "rules that double", "7 MB regex"):
            params = ResolvedSampling(max_tokens=9, structured_output=hostile[name])
            request_id = name.replace(" ", "-")
            await router.submit(request_id, 0, [1, 2, 3], params)
            token_ids, end = await router.answer(request_id)
            assert (token_ids, end.finish_reason, end.invalid) == (
                [],
                inference_pb2.FINISH_REASON_ERROR,
                True,
            )
            assert end.error.startswith("structured output: ")
        good = ResolvedSampling(max_tokens=9, structured_output=StructuredOutput("choice", '["yes"]'))
        await router.submit("good", 0, [1, 2, 3], good)
        assert (await router.answer("good"))[1].finish_reason == inference_pb2.FINISH_REASON_STOP
    finally:
        await router.close()
    assert (await beside).token_ids == alone.token_ids


async def test_what_leaves_nothing_to_choose_is_the_clients_error(client: RingClient) -> None:
    other = asyncio.create_task(client.complete(PROMPT, **fields(1, regex="[a-z ]{5,60}")))
    conflict = {**fields(2, choice=["yes", "no"]), "allowed_token_ids": [5, 6]}
    for ask in (client.complete, client.stream):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            await ask(PROMPT, **conflict)
        assert refused.value.response.status_code == 400
        assert "leave no token" in refused.value.response.json()["error"]["message"]
    answer: Answer = await other
    assert answer.finish_reason == "stop"


async def test_openai_client_chats_in_json(ring: Ring) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["London", "Paris"]},
            "year": {"type": "integer", "minimum": 1, "maximum": 3},
        },
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    async with openai.AsyncOpenAI(base_url=f"{ring.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Where and when?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": schema, "strict": True},
            },
            max_completion_tokens=100,
            n=2,
        )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


async def test_what_comes_around_a_form(ring: Ring) -> None:
    """As reasoning does. Prefill begins it, and decode goes on where that was."""
    around = 'start: /[a-z ]{8,40}/ "</think>" /\\n{1,2}/ @form'
    form = inference_pb2.StructuredOutput(regex="[A-Z]{2}[0-9]{3}", around=around)
    params = inference_pb2.SamplingParams(max_tokens=150, seed=3, structured_output=form)
    request = inference_pb2.GenerateRequest(text=PROMPT, params=params)
    async with grpc.aio.insecure_channel(ring.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        text = "".join([response.text async for response in call])
    assert re.fullmatch(r"[a-z ]{8,40}</think>\n{1,2}[A-Z]{2}[0-9]{3}", text)


def test_the_bare_message_has_room_for_the_largest_grammar() -> None:
    output = StructuredOutput("regex", "x" * 65536)
    params = ResolvedSampling(max_tokens=1, structured_output=output)
    assert ResolvedSampling.from_proto(pb.Submit(params=params.to_proto()).params) == params
