"""Workers of several ranks hand over to each other: the tokens are one worker's, whatever the ranks of either
side and over whatever connector; and what a dead rank leaves behind.

Each decode worker has one connector, so that all of them are used. ``BATON_RING_RANKS=full`` has every pair
over every connector, with a model of as many KV heads as ranks as well: some minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, Service, running, running_routers, worker
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

FULL = os.environ.get("BATON_RING_RANKS") == "full"
NEW_TOKENS = 8
LEAST_MARGIN = 1e-3
"""Between the best logit and the next: ranks add up in another order."""
LENGTHS = (300, 64, 1)
CHUNKED = ("--prefill-chunk", "64", "--max-num-batched-tokens", "512")
WHOLE = ("--no-chunked-prefill", "--max-num-batched-tokens", "1024")
UCX = "ucx" if importlib.util.find_spec("ucxx") else "tcp"
CRASHED = 70

PAIRS = ((1, 2), (2, 1), (2, 2), (2, 4), (4, 2))
"""Ranks of prefill and of decode."""
CONNECTOR_OF: Mapping[int, str] = {1: "tcp", 2: UCX, 4: "gloo"}
"""By decode's ranks."""


@dataclass(frozen=True)
class Setup:
    """A model, and a connector for all pairs (None: ``CONNECTOR_OF``)."""

    model: str
    connector: str | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.connector or 'each'}"

    def connector_to(self, decode_ranks: int) -> str:
        return self.connector or CONNECTOR_OF[decode_ranks]


SETUPS = [Setup("qwen3")]  # 2 KV heads, of which 4 ranks hold each one twice
if FULL:
    SETUPS = [Setup(m, c) for m in ("qwen3", "llama-tied-mha") for c in ("tcp", UCX, "gloo")]


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: list[int]
    """One worker's."""


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    chosen: Setup = request.param
    return chosen


@pytest.fixture(scope="module")
def model(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[setup.model](tmp_path_factory.mktemp("model") / setup.model)


def clear_question(model: Path, rng: random.Random, length: int) -> Question:
    while True:
        prompt = [rng.randrange(250) for _ in range(length)]
        answer, margin = oracle_greedy(model, prompt, NEW_TOKENS)
        if margin > LEAST_MARGIN:
            return Question(prompt, answer)


@pytest.fixture(scope="module")
def questions(model: Path) -> Mapping[tuple[int, int], list[Question]]:
    """Pair → what to ask it. No two prompts begin alike."""
    rng = random.Random(5)
    return {pair: [clear_question(model, rng, length) for length in LENGTHS] for pair in PAIRS}


@pytest.fixture(scope="module")
def rings(
    setup: Setup, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[tuple[int, int], Ring]]:
    tmp = tmp_path_factory.mktemp("rings")

    def start(role: str, ranks: int, block_size: int, connector: str, *options: str) -> Service:
        pool = ("--block-size", str(block_size), "--num-blocks", str(2048 // block_size))
        common = ("--connector", connector, "--verify-handoff", "--tensor-parallel-size", str(ranks))
        return worker(tmp, f"{role}-{ranks}", role, str(model), *common, *pool, *options)

    offered = setup.connector or "auto"
    prefills = {
        1: start("prefill", 1, 16, offered, *CHUNKED),
        2: start("prefill", 2, 16, offered, *WHOLE),
        4: start("prefill", 4, 32, offered, *CHUNKED),
    }
    decodes = {ranks: start("decode", ranks, 16, setup.connector_to(ranks)) for ranks in CONNECTOR_OF}
    groups = {f"{p}-to-{d}": [prefills[p], decodes[d]] for p, d in PAIRS}
    with running([*prefills.values(), *decodes.values()]), running_routers(tmp, str(model), groups) as made:
        yield {(p, d): made[f"{p}-to-{d}"] for p, d in PAIRS}


async def ask(ring: Ring, model: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """All of them at once."""
    async with RingClient(ring.url, model) as client:
        asked = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True) for p in prompts]
        return [answer.token_ids for answer in await asyncio.gather(*asked)]


def counted(service: Service, metric: str, label: str = "") -> float:
    """A counter's sum over labels that contain ``label``."""
    samples = service.metrics().items()
    return sum(value for name, value in samples if name.startswith(f"{metric}_total{{") and label in name)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
async def test_the_tokens_are_one_workers(
    rings: Mapping[tuple[int, int], Ring],
    questions: Mapping[tuple[int, int], list[Question]],
    setup: Setup,
    model: Path,
    pair: tuple[int, int],
) -> None:
    ring = rings[pair]
    prefill, decode = ring.of_role("prefill")[0], ring.of_role("decode")[0]
    peer = f'connector="{setup.connector_to(pair[1])}"'

    def moved() -> tuple[float, float]:
        sent = counted(prefill, "baton_handoff_sent_bytes", f'peer="{decode.ready.address}"')  # type: ignore[union-attr]
        received = counted(decode, "baton_handoff_received_bytes", f'peer="{prefill.ready.address}"')  # type: ignore[union-attr]
        return sent, received

    prompts = [question.prompt for question in questions[pair]]
    expected = [question.answer for question in questions[pair]]
    assert await ask(ring, setup.model, prompts) == expected
    cold = moved()
    assert await ask(ring, setup.model, prompts) == expected, "with warm caches"
    ring.wait_idle()
    assert counted(decode, "baton_handoff_received_bytes", peer) > 0
    shape = json.loads((model / "config.json").read_text())
    heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    tokens = sum(-(-length // 16) * 16 for length in LENGTHS)
    wanted = tokens * max(heads, pair[1]) * layers * 2 * head_dim * 4
    assert cold[1] == wanted, "each rank of decode gets its heads once, and nothing else"
    assert cold[0] == cold[1]
    for service in ring.workers:
        # What breaks is done again, so that the tokens alone would not show it.
        assert counted(service, "baton_handoffs_aborted") == 0
