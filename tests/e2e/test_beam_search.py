"""Beam search with the demo model: over HTTP, gRPC and every connector at hand, and offline, it is what
transformers finds; also while other requests run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton import hub
from baton.core.beam_search import BeamParams, EarlyStopping
from baton.engine.llm import LLM
from baton.request.params import SamplingParams
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.deep import all_deep_but
from tests.support.oracle_beams import Answer, oracle_beams
from tests.support.ring import Ring, running_ring

pytestmark = pytest.mark.beside

NEW_TOKENS = 20
PROMPT = "The little boy went to the park and"
CASES: tuple[tuple[dict[str, Any], BeamParams, int], ...] = (
    ({"best_of": 3, "n": 2}, BeamParams(3), 2),
    ({"n": 4, "length_penalty": -1.0, "early_stopping": True}, BeamParams(4, -1.0, EarlyStopping.ALWAYS), 4),
    (
        {"best_of": 8, "length_penalty": 2.0, "early_stopping": "never"},
        BeamParams(8, 2.0, EarlyStopping.NEVER),
        1,
    ),
)
"""Fields of a request, and what they mean."""


@pytest.fixture(scope="module")
def oracle() -> list[list[Answer]]:
    """transformers' answers to the cases."""
    llm = LLM("demo", num_blocks=16)
    ids = llm.tokenizer.encode(PROMPT, True)
    path, ends = Path(hub.resolve_model("demo")), sorted(llm.model.eos_token_ids)
    return [oracle_beams(path, ids, params, NEW_TOKENS, ends, n) for _, params, n in CASES]


@pytest.fixture(
    scope="module",
    params=all_deep_but(
        1,
        [
            "tcp",
            pytest.param(
                "ucx",
                marks=pytest.mark.skipif(
                    importlib.util.find_spec("ucxx") is None,
                    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
                ),
            ),
        ],
    ),
)
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    options = ("--connector", request.param, "--verify-handoff")
    with running_ring(tmp_path_factory.mktemp("beams"), options=options) as ring:
        yield ring


@pytest.fixture
async def client(ring: Ring) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=ring.url, timeout=60) as client:
        yield client
    ring.wait_idle()


def body(fields: dict[str, Any]) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "use_beam_search": True, "return_token_ids": True}
    return asked | fields


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def committed(ring: Ring) -> float:
    [decode] = ring.of_role("decode")
    return sum(n for name, n in decode.metrics().items() if name.startswith("baton_handoffs_completed_total"))


async def test_answers_are_transformers_also_while_others_run(
    client: httpx.AsyncClient, ring: Ring, oracle: list[list[Answer]]
) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    asked = [body(fields) for fields, _, _ in CASES for _ in range(2)] + [plain] * 3
    before = committed(ring)
    responses = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in asked))
    answers = [response.json() for response in responses]
    found = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers[:-3]]
    assert found == [ids_of(each) for each in oracle for _ in range(2)]
    reasons = [[choice["finish_reason"] for choice in answer["choices"]] for answer in answers[:-3]]
    assert reasons == [[answer.finish_reason.value for answer in each] for each in oracle for _ in range(2)]
    for answer, each in zip(answers, [each for each in oracle for _ in range(2)], strict=False):
        assert answer["usage"]["completion_tokens"] == sum(map(len, ids_of(each)))
    assert len({answer["choices"][0]["text"] for answer in answers[-3:]}) == 1
    assert committed(ring) - before == len(asked), "one handoff for each request"


async def test_a_stream_brings_whole_answers_at_the_end(
    client: httpx.AsyncClient, oracle: list[list[Answer]]
) -> None:
    fields, _, n = CASES[0]
    tokens: list[list[int]] = [[] for _ in range(n)]
    async with client.stream("POST", "/v1/completions", json=body(fields) | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
    assert tokens == ids_of(oracle[0])


async def test_a_chat_has_beams_too(client: httpx.AsyncClient) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "use_beam_search": True,
        "best_of": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = (await client.post("/v1/chat/completions", json=asked)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    totals = [
        sum(token["logprob"] for token in choice["logprobs"]["content"]) for choice in answer["choices"]
    ]
    lengths = [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
    assert totals[0] / lengths[0] >= totals[1] / lengths[1]


async def test_over_grpc_the_best_answer_is_told(ring: Ring, oracle: list[list[Answer]]) -> None:
    search = pb.BeamSearch(width=8, length_penalty=2.0, early_stopping=pb.EARLY_STOPPING_NEVER)
    params = pb.SamplingParams(max_tokens=NEW_TOKENS, beam_search=search)
    async with grpc.aio.insecure_channel(ring.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text=PROMPT, params=params)
        )
        tokens = [token async for response in call for token in response.token_ids]
    assert [tokens] == ids_of(oracle[2])
    ring.wait_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "temperature": 0.7}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
async def test_bad_fields_are_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/completions", json=body(fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_offline_finds_the_same(oracle: list[list[Answer]]) -> None:
    llm = LLM("demo", dtype="float32", num_blocks=512)
    params = [SamplingParams(max_tokens=NEW_TOKENS, use_beam_search=True, **fields) for fields, _, _ in CASES]
    results = llm.generate([PROMPT] * len(CASES), params, progress=False)
    found = [[list(output.token_ids) for output in result.outputs] for result in results]
    assert found == [ids_of(each) for each in oracle]
    [text] = {result.outputs[0].text for result in results[:1]}
    assert text
    assert llm.engine.stats().blocks.held == 0
