"""Models whose layers keep different things, through one ring each: chats of several turns with evictions in
between, and all at once several answers, beams, drafts and preemptions. The answers are transformers'.

A hybrid, which keeps states and latents; with ``BATON_FAMILIES=full`` one model of each kind.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from baton.engine.kv.page_counts import PageCounts
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout
from baton_kernels.kv_layout import KVLayout
from tests.support.clients import RingClient
from tests.support.family_cases import (
    BEAM_TOKENS,
    BEAMS,
    FULL,
    MIN_MARGIN,
    NEW_TOKENS,
    Question,
    beam_questions,
    questions,
)
from tests.support.family_models import FAMILY_MODELS
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import oracle_greedy

pytestmark = [pytest.mark.beside, pytest.mark.deep]

MODELS = ("gemma3", "deepseek-v3", "qwen3-next", "nemotron-h", "kimi-linear") if FULL else ("kimi-linear",)
CONNECTOR = "ucx" if importlib.util.find_spec("ucxx") else "tcp"
BLOCK_SIZE, CHUNK = 16, 64
LENGTHS = (170, 130, 90, 50, 33)
"""The lengths of prompts whose answers do not fit into the decode worker's pool together."""
BEAM_PROMPT = 70
TURNS = (200, 40, 60, 25)
"""The tokens that each turn of a chat adds to those before it and their answers."""
TURN_TOKENS = 12


@dataclass(frozen=True)
class Served:
    """A model, and a ring for it whose decode worker drafts, has few pages and swaps."""

    path: Path
    ring: Ring
    layout: KVLayout


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tmp = tmp_path_factory.mktemp("groups")
    path = FAMILY_MODELS[request.param](tmp / request.param)
    layout = kv_layout(ModelConfig.from_dir(path), BLOCK_SIZE, torch.float32)
    counts = PageCounts(layout, CHUNK)
    longest = counts.of(sum(TURNS) + len(TURNS) * TURN_TOKENS)
    both = ("--connector", CONNECTOR, "--verify-handoff", "--block-size", str(BLOCK_SIZE))
    searched = counts.of(BEAM_PROMPT + BEAM_TOKENS) * BEAMS.width
    few = max(longest, searched) + 8 * layout.state_pages + 2 * layout.num_tables
    with running_ring(
        tmp,
        model=str(path),
        options=(*both, "--prefill-chunk", str(CHUNK)),
        prefill_options=("--num-blocks", str(few)),
        decode_options=(
            *("--num-blocks", str(few), "--host-kv-memory", "16MiB"),
            *("--speculative-method", "ngram", "--num-speculative-tokens", "3"),
        ),
    ) as ring:
        yield Served(path, ring, layout)


def counted(ring: Ring, role: str, name: str) -> float:
    """A counter of the only worker of a role."""
    [worker] = ring.of_role(role)
    return sum(value for key, value in worker.metrics().items() if key.startswith(f"{name}_total"))


def draw(rng: random.Random, path: Path, begins: list[int], more: int) -> tuple[list[int], list[int]]:
    """A prompt that begins like this, and transformers' answer."""
    while True:
        prompt = begins + [rng.randrange(256) for _ in range(more)]
        answer, margin = oracle_greedy(path, prompt, TURN_TOKENS)
        if margin > MIN_MARGIN:
            return prompt, answer


@pytest.mark.parametrize("evicts", [False, True], ids=["kept", "evicted"])
async def test_each_turn_is_that_of_transformers(served: Served, evicts: bool) -> None:
    rng = random.Random(int(evicts))
    said: list[int] = []
    before = 0
    async with RingClient(served.ring.url, served.path.name) as client:
        for more in TURNS:
            prompt, answer = draw(rng, served.path, said, more)
            told = await client.complete(prompt, max_tokens=TURN_TOKENS, temperature=0)
            assert told.token_ids == answer
            # Prefill has computed the prompts of earlier turns, and not their answers.
            assert told.cached_tokens == (0 if evicts else before)
            said, before = prompt + answer, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            for _ in range(3 * evicts):
                await client.complete([rng.randrange(256) for _ in range(300)], max_tokens=2, temperature=0)
    served.ring.wait_idle()


async def choices(client: httpx.AsyncClient, question: Question, **fields: object) -> list[list[int]]:
    """All answers to one request."""
    body = {
        "prompt": question.prompt,
        "return_token_ids": True,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


async def test_answers_beams_drafts_and_preemptions(served: Served) -> None:
    asked, searched = questions(served.path, LENGTHS), beam_questions(served.path, (BEAM_PROMPT,))
    async with RingClient(served.ring.url, served.path.name) as client:
        model = {"model": served.path.name}
        many = [choices(client.http, question, **model, max_tokens=NEW_TOKENS) for question in asked]
        three = choices(client.http, asked[0], **model, max_tokens=NEW_TOKENS, n=3)
        beams = {"use_beam_search": True, "best_of": BEAMS.width, "n": 2, "max_tokens": BEAM_TOKENS}
        search = [choices(client.http, question, **model, **beams) for question in searched]
        found = await asyncio.gather(*many, three, *search)
    assert found[: len(asked)] == [question.answers for question in asked]
    assert found[len(asked)] == 3 * asked[0].answers
    assert found[len(asked) + 1 :] == [question.answers for question in searched]
    assert counted(served.ring, "decode", "baton_speculation_drafted_tokens") > 0
    assert counted(served.ring, "decode", "baton_preemptions") > 0
    assert counted(served.ring, "decode", "baton_handoffs_aborted") == 0
    served.ring.wait_idle()
