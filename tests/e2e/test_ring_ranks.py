"""Workers of several ranks hand over to each other: the tokens are one worker's, whatever the ranks of either
side and over whatever connector; and what a dead rank leaves behind.

Some pairs, each over another connector. ``BATON_RING_RANKS=full`` has all pairs over every connector, with a
model of 2 KV heads and one of 4: some minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from tests.support.clients import RingClient
from tests.support.nixl import HAVE_NIXL
from tests.support.ring import Ring, Service, running, running_routers, worker
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

FULL = os.environ.get("BATON_RING_RANKS") == "full"
NEW_TOKENS = 8
MIN_MARGIN = 1e-3
"""Between the best logit and the next: ranks add up in another order."""
LENGTHS = (300, 64, 1)
CHUNKED = ("--prefill-chunk", "64", "--max-num-batched-tokens", "512")
WHOLE = ("--no-chunked-prefill", "--max-num-batched-tokens", "1024")
UCX = "ucx" if importlib.util.find_spec("ucxx") else "tcp"
NIXL = ("nixl",) if HAVE_NIXL else ()
CRASHED, RETIRED = 70, 75


class Split(NamedTuple):
    """Of a worker's model."""

    tp: int
    pp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "")


class Pair(NamedTuple):
    prefill: Split
    decode: Split

    def __str__(self) -> str:
        return f"{self.prefill}-to-{self.decode}"


ONE, TWO, FOUR = Split(1), Split(2), Split(4)
STAGES = Split(1, 2)
ALL = (
    *(Pair(p, d) for p, d in ((ONE, TWO), (TWO, ONE), (TWO, TWO), (TWO, FOUR), (FOUR, TWO), (ONE, FOUR))),
    *(Pair(p, d) for p, d in ((STAGES, TWO), (TWO, Split(2, 2)), (Split(2, 2), STAGES), (STAGES, FOUR))),
)
SOME: Mapping[Pair, str] = {Pair(STAGES, FOUR): "tcp", Pair(TWO, ONE): "gloo", Pair(TWO, FOUR): UCX}
"""With the connector of each."""
PAIRS = ALL if FULL else tuple(SOME)


@dataclass(frozen=True)
class Setup:
    """A model, and a connector for all pairs (None: as in ``SOME``)."""

    model: str
    connector: str | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.connector or 'each'}"

    def connector_of(self, pair: Pair) -> str:
        return self.connector or SOME[pair]

    def offered_by_prefill(self, split: Split) -> str:
        return self.connector or ("tcp" if split == STAGES else "auto")

    def offered_by_decode(self, split: Split) -> str:
        return self.connector or ("gloo" if split == ONE else "auto")


SETUPS = [Setup("qwen3")]  # 2 KV heads, of which 4 ranks hold each one twice
if FULL:
    SETUPS = [Setup(m, c) for m in ("qwen3", "llama-tied-mha") for c in ("tcp", UCX, *NIXL, "gloo")]


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
        if margin > MIN_MARGIN:
            return Question(prompt, answer)


@pytest.fixture(scope="module")
def questions(model: Path) -> Mapping[Pair, list[Question]]:
    """Pair → what to ask it. No two prompts begin alike."""
    rng = random.Random(5)
    return {pair: [clear_question(model, rng, length) for length in LENGTHS] for pair in PAIRS}


@pytest.fixture(scope="module")
def rings(
    setup: Setup, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Pair, Ring]]:
    tmp = tmp_path_factory.mktemp("rings")

    def start(role: str, split: Split, block_size: int, connector: str, *options: str) -> Service:
        pool = ("--block-size", str(block_size), "--num-blocks", str(2048 // block_size))
        ranks = ("--tensor-parallel-size", str(split.tp), "--pipeline-parallel-size", str(split.pp))
        common = ("--connector", connector, "--verify-handoff", *ranks, *pool)
        return worker(tmp, f"{role}-{split}", role, str(model), *common, *options)

    def prefill(split: Split) -> Service:
        block_size, chunks = (32 if split == FOUR else 16), (WHOLE if split == STAGES else CHUNKED)
        return start("prefill", split, block_size, setup.offered_by_prefill(split), *chunks)

    def decode(split: Split) -> Service:
        return start("decode", split, 16, setup.offered_by_decode(split))

    prefills = {split: prefill(split) for split in dict.fromkeys(pair.prefill for pair in PAIRS)}
    decodes = {split: decode(split) for split in dict.fromkeys(pair.decode for pair in PAIRS)}
    groups = {str(pair): [prefills[pair.prefill], decodes[pair.decode]] for pair in PAIRS}
    with running([*prefills.values(), *decodes.values()]), running_routers(tmp, str(model), groups) as made:
        yield {pair: made[str(pair)] for pair in PAIRS}


async def ask(ring: Ring, model: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """All of them at once."""
    async with RingClient(ring.url, model) as client:
        asked = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True) for p in prompts]
        return [answer.token_ids for answer in await asyncio.gather(*asked)]


def counted(service: Service, metric: str, label: str = "") -> float:
    """A counter's sum over labels that contain ``label``."""
    samples = service.metrics().items()
    return sum(value for name, value in samples if name.startswith(f"{metric}_total{{") and label in name)


@pytest.mark.beside
@pytest.mark.parametrize("pair", PAIRS, ids=str)
async def test_the_tokens_are_one_workers(
    rings: Mapping[Pair, Ring],
    questions: Mapping[Pair, list[Question]],
    setup: Setup,
    model: Path,
    pair: Pair,
) -> None:
    ring = rings[pair]
    prefill, decode = ring.of_role("prefill")[0], ring.of_role("decode")[0]
    peer = f'connector="{setup.connector_of(pair)}"'

    def moved() -> tuple[float, float]:
        sent = counted(prefill, "baton_handoff_sent_bytes", f'peer="{decode.ready.address}"')
        received = counted(decode, "baton_handoff_received_bytes", f'peer="{prefill.ready.address}"')
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
    wanted = tokens * max(heads, pair.decode.tp) * layers * 2 * head_dim * 4
    assert cold[1] == wanted, "each rank of decode gets its heads once, and nothing else"
    assert cold[0] == cold[1]
    for service in ring.workers:
        # What breaks is done again, so that the tokens alone would not show it.
        assert counted(service, "baton_handoffs_aborted") == 0


def ranks_of(service: Service) -> list[psutil.Process]:
    """The processes of its other ranks."""
    children = psutil.Process(service.process.pid).children()
    return [child for child in children if "baton.rank" in child.cmdline()]


async def test_a_rank_that_dies_in_a_handoff_leaves_nothing_held(
    rings: Mapping[Pair, Ring],
    questions: Mapping[Pair, list[Question]],
    setup: Setup,
) -> None:
    """The prefill worker does not outlive it."""
    ring, other = rings[Pair(TWO, FOUR)], rings[Pair(STAGES, FOUR)]
    others = questions[Pair(STAGES, FOUR)]
    [prefill], [decode] = ring.of_role("prefill"), ring.of_role("decode")
    aborted = counted(decode, "baton_handoffs_aborted")
    victim = ranks_of(prefill)[-1]
    held = 'baton_handoff_held_blocks{role="decode"}'
    async with RingClient(ring.url, setup.model) as client:
        long = [random.Random(9).randrange(250) for _ in range(900)]
        request = asyncio.create_task(client.complete(long, max_tokens=NEW_TOKENS))
        async with asyncio.timeout(60):
            while not (await asyncio.to_thread(decode.metrics))[held]:  # noqa: ASYNC110 (no event tells it)
                await asyncio.sleep(0.01)
        victim.kill()
        killed = time.monotonic()
        asked = asyncio.create_task(
            ask(other, setup.model, [q.prompt for q in questions[Pair(STAGES, FOUR)]])
        )
        # Decode computes it by itself: nobody else prefills.
        assert len((await asyncio.wait_for(request, 60)).token_ids) == NEW_TOKENS
    assert await asyncio.to_thread(prefill.process.wait, 10) == CRASHED
    assert time.monotonic() - killed < 3
    assert await asked == [question.answer for question in others]
    other.wait_idle()
    assert decode.blocks()["held"] == 0
    assert counted(decode, "baton_handoffs_aborted") == aborted + 1


@pytest.mark.deep
async def test_a_worker_whose_rank_hangs_retires_rather_than_reuse_its_pages(
    rings: Mapping[Pair, Ring], setup: Setup
) -> None:
    """The decode worker does not outlive it: this is the last test here."""
    ring = rings[Pair(STAGES, FOUR)]
    [decode] = ring.of_role("decode")
    others = ranks_of(decode)
    others[0].suspend()
    async with RingClient(ring.url, setup.model) as client:
        with pytest.raises((httpx.HTTPStatusError, TimeoutError)):
            await asyncio.wait_for(client.complete([1, 2, 3], max_tokens=NEW_TOKENS), 10)
    assert await asyncio.to_thread(decode.process.wait, 15) == RETIRED
    _, alive = psutil.wait_procs(others, 5)
    assert not alive, "a rank outlived its worker"
