"""Beam search with the demo model: over HTTP, gRPC and every connector at hand, and offline, it is what
transformers finds; also while other requests run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton import hub
from baton.beam_search import BeamParams, EarlyStopping
from baton.connector import ucx
from baton.engine.llm import LLM
from baton.request.params import SamplingParams
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.oracle_beams import Answer, oracle_beams
from tests.support.ring import Ring, running_ring

NEW_TOKENS = 20
PROMPT = "The little boy went to the park and"
CASES: tuple[tuple[dict[str, Any], BeamParams, int], ...] = (
    ({"best_of": 3, "n": 2}, BeamParams(3), 2),
    ({"n": 4, "length_penalty": -1.0, "early_stopping": True}, BeamParams(4, -1.0, EarlyStopping.ALWAYS), 4),
    ({"best_of": 8, "length_penalty": 2.0, "early_stopping": "never"}, BeamParams(8, 2.0, EarlyStopping.NEVER), 1),
)
"""Fields of a request, and what they mean."""


@pytest.fixture(scope="module")
def oracle() -> list[list[Answer]]:
    """transformers' answers to the cases."""
    llm = LLM("demo", num_blocks=16)
    ids = llm.tokenizer.encode(PROMPT, True)
    path, ends = Path(hub.resolve_model("demo")), sorted(llm.model.eos_token_ids)
    return [oracle_beams(path, ids, params, NEW_TOKENS, ends, n) for _, params, n in CASES]


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    if request.param == "ucx" and not ucx.available():
        pytest.skip("ucx is not installed")
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


async def test_answers_are_transformers_also_while_others_run(
    client: httpx.AsyncClient, ring: Ring, oracle: list[list[Answer]]
) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    asked = [body(fields) for fields, _, _ in CASES for _ in range(2)] + [plain] * 3
    answers = [(await response).json() for response in [client.post("/v1/completions", json=each) for each in asked]]
    found = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers[:-3]]
    assert found == [ids_of(answers) for answers in oracle for _ in range(2)]
