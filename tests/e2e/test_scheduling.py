"""Priorities, deadlines and the host tier in a ring of real processes whose pools are too small."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

NAME = "llama"
NEW_TOKENS = 60
OPTIONS = (
    *("--num-blocks", "28", "--host-kv-memory", "16MiB"),
    *("--scheduling-policy", "priority", "--priority-aging", "5"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[NAME](tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def ring(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(tmp_path_factory.mktemp("ring"), model=str(model), options=OPTIONS) as running:
        yield running


@pytest.fixture
async def client(ring: Ring) -> AsyncIterator[RingClient]:
    async with RingClient(ring.url, NAME) as client:
        yield client
    ring.wait_idle()


def total(ring: Ring, metric: str, role: str | None = None) -> float:
    workers = ring.workers if role is None else ring.of_role(role)
    samples = [sample for worker in workers for sample in worker.metrics().items()]
    return sum(value for name, value in samples if name.startswith(metric))


async def test_answers_are_transformers_whoever_was_preempted_or_evicted(
    client: RingClient, ring: Ring, model: Path
) -> None:
    rng = random.Random(3)
    asked: list[tuple[list[int], list[int], int]] = []
    while len(asked) < 14:
        prompt = [rng.randrange(256) for _ in range(rng.choice((40, 70)))]
        answer, margin = oracle_greedy(model, prompt, NEW_TOKENS)
        if margin > 1e-3:
            asked.append((prompt, answer, rng.randrange(-2, 3)))
    for _ in range(2):
        answers = await asyncio.gather(
            *(
                client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0, priority=priority)
                for prompt, _, priority in asked
            )
        )
        assert [answer.token_ids for answer in answers] == [expected for _, expected, _ in asked]
    assert total(ring, "baton_preemptions_total") > 0
    for role in ("prefill", "decode"):
        assert total(ring, "baton_host_kv_hit_blocks_total", role) > 0, role
    assert total(ring, "baton_sequences_swapped_in_total", "decode") > 0


async def test_a_deadline_ends_the_answer_and_frees_its_blocks(client: RingClient, ring: Ring) -> None:
    before = total(ring, "baton_deadlines_exceeded_total")
    # A worker looks for deadlines every 0.1 s: in 0.2 s no machine computes sixteen such answers, of which
    # its pool has room for one at a time.
    body = client.body([5, 6, 7], max_tokens=400, temperature=0, n=16)
    headers = {"x-request-timeout": "0.1"}
    response = await client.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 504, response.text
    assert response.json()["error"]["code"] == "deadline_exceeded"
    streamed = await client.http.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    if streamed.status_code == 200:
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        error = json.loads(events[-2])["error"]
    else:  # it passed before the first token
        error = streamed.json()["error"]
    assert error["code"] == "deadline_exceeded"
    ring.wait_idle(2.0)
    assert total(ring, "baton_deadlines_exceeded_total") > before
    async with grpc.aio.insecure_channel(ring.grpc) as channel:
        call = InferenceStub(channel).Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5, 6, 7]),
                params=pb.SamplingParams(max_tokens=400, ignore_eos=True),
            ),
            timeout=0.03,  # in which no machine takes 400 steps
        )
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [response async for response in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 2
    ring.wait_idle(2.0)
