"""Decode workers with the demo model's own Medusa heads and EAGLE layer: the same answers in fewer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.engine.llm import LLM
from baton.request.params import SamplingParams
from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, worker

pytestmark = [pytest.mark.beside, pytest.mark.deep]

QUESTIONS = (
    "What is Baton?",
    "What is prefill?",
    "What is paged attention?",
    "What is continuous batching?",
    "Why split prefill and decode?",
)
PROMPTS = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
SAMPLINGS: tuple[dict[str, float | int], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11, "repetition_penalty": 1.05},
)


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ring]]:
    """One prefill worker, and behind it a decode worker for each method, over TCP."""
    tmp = tmp_path_factory.mktemp("heads")
    tcp = ("--connector", "tcp")
    prefill = worker(tmp, "prefill", "prefill", "demo", *tcp)
    drafts = ("--num-speculative-tokens", "3")
    decode = {
        method: worker(tmp, method, "decode", "demo", *tcp, "--speculative-method", method, *drafts)
        for method in ("medusa", "eagle")
    }
    groups = {method: [prefill, service] for method, service in decode.items()}
    with running([prefill, *decode.values()]), running_routers(tmp, "demo", groups) as rings:
        yield rings


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of an engine that drafts nothing."""
    llm = LLM("demo", dtype="float32", device="cpu", num_blocks=128)
    params = [SamplingParams(max_tokens=48, ignore_eos=True, **how) for how in SAMPLINGS]  # type: ignore[arg-type]
    prompts = [prompt for prompt in PROMPTS for _ in params]
    answers = llm.generate(prompts, params * len(PROMPTS), progress=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize("method", ["medusa", "eagle"])
async def test_answers_are_the_same_in_fewer_steps(
    rings: dict[str, Ring], expected: list[list[int]], method: str
) -> None:
    ring = rings[method]
    async with RingClient(ring.url, "demo") as client:
        asked = [
            client.stream(prompt, max_tokens=48, **sampling) for prompt in PROMPTS for sampling in SAMPLINGS
        ]
        answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == expected
    assert all(len(answer.arrivals) < len(answer.token_ids) / 1.5 for answer in answers), "one token a frame"
    ring.wait_idle()
    assert mean_accepted_length(ring) > 1.8


def mean_accepted_length(ring: Ring) -> float:
    """Tokens per verification, the one behind the accepted drafts included, as the PromQL of
    docs/speculation.md has it."""
    [decode] = ring.of_role("decode")
    found = {name.partition("{")[0]: value for name, value in decode.metrics().items()}
    verifications = found["baton_speculation_verifications_total"]
    return 1 + found["baton_speculation_accepted_tokens_total"] / verifications
