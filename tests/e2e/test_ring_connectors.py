"""The ring gives one worker's tokens over every connector, whatever the workers' block sizes and chunks and
however many they are; and links come back when a worker does.

For each connector one set of workers serves many rings: every prefill worker with every decode worker alone,
and rings of several that differ among themselves. Each is asked twice, with prompts of its own: first nothing
is cached, then all of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pytest

from baton.net.heartbeat import TEMPO
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.nixl import needs_nixl
from tests.support.ring import Ring, Service, running, running_ring, running_routers, worker
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.beside

MODEL = "qwen3"
NEW_TOKENS = 8
MIN_MARGIN = 2e-4
"""Between the best logit and the next: an answer with closer ones may rightly differ from batch to batch."""
LENGTHS = (600, 600, 64, 64, 1, 1)
"""Several chunks and messages, and a part of a block; whole blocks of either size; within a block. The long
ones first: they keep their workers busy until the others are placed on other workers."""
CHUNKED = ("--prefill-chunk", "128", "--max-num-batched-tokens", "512")
WHOLE = ("--no-chunked-prefill", "--max-num-batched-tokens", "1024")
TOKENS = 8192
"""In each pool."""
MAX_ASKED = 10
"""How often a ring is asked again until all of its workers took part."""
MAX_COPIES = 16
"""Of each prompt, at once."""

without_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
)

PREFILLS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "p16-chunked": (16, CHUNKED),
    "p64-whole": (64, WHOLE),
    "p64-chunked": (64, CHUNKED),
    "p16-whole": (16, WHOLE),
}
DECODES: Mapping[str, int] = {"d16": 16, "d64": 64, "d16-too": 16}
RINGS: Mapping[str, tuple[str, ...]] = {
    **{f"{p} to {d}": (p, d) for p, d in product(PREFILLS, ("d16", "d64"))},
    "two to one": ("p16-chunked", "p64-whole", "d16"),
    "one to two": ("p64-chunked", "d16", "d64"),
    "three to three": ("p16-chunked", "p64-whole", "p64-chunked", "d16", "d64", "d16-too"),
}


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: list[int]
    """One worker's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[MODEL](tmp_path_factory.mktemp("model") / MODEL)


async def ask(ring: Ring, prompts: Sequence[list[int]]) -> list[list[int]]:
    """All of them at once."""
    async with RingClient(ring.url, MODEL) as client:
        asked = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0) for p in prompts]
        return [answer.token_ids for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def questions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Question]]:
    """Ring → what to ask it. No two prompts begin alike."""
    rng = random.Random(11)
    prompts = [clear_prompt(model, rng, length) for ring in RINGS for length in lengths(ring)]
    tmp = tmp_path_factory.mktemp("one")
    with running_ring(tmp, model=str(model), prefill=0, decode=0, both=1, options=CHUNKED) as ring:
        answers = asyncio.run(ask(ring, prompts))
    asked = iter(map(Question, prompts, answers))
    return {ring: [next(asked) for _ in lengths(ring)] for ring in RINGS}


def lengths(ring: str) -> tuple[int, ...]:
    """One of each kind will do for a pair of workers."""
    return LENGTHS if len(RINGS[ring]) > 2 else LENGTHS[::2]


def clear_prompt(model: Path, rng: random.Random, length: int) -> list[int]:
    while True:
        prompt = [rng.randrange(256) for _ in range(length)]
        if oracle_greedy(model, prompt, NEW_TOKENS)[1] > MIN_MARGIN:
            return prompt


@dataclass(frozen=True)
class Over:
    """A connector, and where it is UCX the transports that it is confined to."""

    connector: str
    transports: str | None = None


@pytest.fixture(
    scope="module",
    params=all_deep_but(
        1,
        [
            pytest.param(Over("tcp"), id="tcp"),
            pytest.param(Over("ucx"), id="ucx", marks=without_ucxx),
            pytest.param(Over("ucx", "posix,self"), id="ucx-shm", marks=without_ucxx),
            pytest.param(Over("ucx", "tcp"), id="ucx-tcp", marks=without_ucxx),
            pytest.param(Over("nixl"), id="nixl", marks=needs_nixl),
            pytest.param(Over("gloo"), id="gloo"),
        ],
    ),
)
def over(request: pytest.FixtureRequest) -> Over:
    chosen: Over = request.param
    return chosen


@pytest.fixture(scope="module")
def rings(over: Over, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ring]]:
    """All of RINGS over one connector."""
    tmp = tmp_path_factory.mktemp("rings")

    def start(name: str, role: str, block_size: int, options: tuple[str, ...] = ()) -> Service:
        pool = ("--block-size", str(block_size), "--num-blocks", str(TOKENS // block_size))
        options = ("--connector", over.connector, "--log-level", "debug", *pool, *options)
        return worker(tmp, name, role, str(model), *options)

    workers = {name: start(name, "prefill", size, options) for name, (size, options) in PREFILLS.items()}
    workers |= {name: start(name, "decode", size) for name, size in DECODES.items()}
    groups = {ring: [workers[name] for name in names] for ring, names in RINGS.items()}
    with pytest.MonkeyPatch.context() as patch:
        if over.transports is not None:
            patch.setenv("UCX_TLS", over.transports)
        with running(list(workers.values())), running_routers(tmp, str(model), groups) as running_rings:
            yield running_rings


def counted(services: Iterable[Service], metric: str, label: str = "") -> float:
    """A counter's sum over services and labels that contain ``label``."""
    return sum(
        value
        for service in services
        for name, value in service.metrics().items()
        if name.startswith(f"{metric}_total{{") and label in name
    )


@pytest.mark.parametrize("name", RINGS)
async def test_the_tokens_are_one_workers(
    rings: Mapping[str, Ring],
    questions: Mapping[str, list[Question]],
    over: Over,
    name: str,
) -> None:
    ring = rings[name]
    decodes = ring.of_role("decode")
    prompts = [question.prompt for question in questions[name]]
    expected = [question.answer for question in questions[name]]

    def received() -> float:
        return counted(decodes, "baton_handoff_received_bytes", f'connector="{over.connector}"')

    done = {service.name: counted([service], "baton_handoffs_completed") for service in ring.workers}
    bytes_at = [received()]
    for caches in ("cold", "warm"):
        assert await ask(ring, prompts) == expected, f"with {caches} caches"
        bytes_at.append(received())
    ring.wait_idle()
    cold, warm = (after - before for before, after in pairwise(bytes_at))
    assert cold > 0
    assert warm < cold / 2 or len(decodes) > 1, "what decode had was sent again"

    def idle() -> list[str]:
        return [
            service.name
            for service in ring.workers
            if counted([service], "baton_handoffs_completed") == done[service.name]
        ]

    # Who is free when a request comes is a matter of milliseconds; and a worker that was measured slow, on
    # cores that it shares, gets its part only of more than the others take at once.
    for turn in range(MAX_ASKED):
        if idle():
            copies = min(2**turn, MAX_COPIES)
            await asyncio.sleep(TEMPO.heartbeat_s)
            assert await ask(ring, copies * prompts) == copies * expected
    assert not idle()
    ring.wait_idle()
    for service in ring.workers:
        # What breaks is done again, so that the tokens alone would not show it.
        assert counted([service], "baton_handoffs_aborted") == 0


PREFILL_STAGES = ("asked", "credited", "ready", "computed", "complete")
DECODE_STAGES = ("asked", "credited", "ready", "granted", "arrived", "committed", "started")


async def test_each_side_tells_when_it_came_to_each_stage(
    rings: Mapping[str, Ring], questions: Mapping[str, list[Question]]
) -> None:
    ring = rings["p64-chunked to d16"]
    (prefill,), (decode,) = ring.of_role("prefill"), ring.of_role("decode")
    await ask(ring, [[1, *questions["p64-chunked to d16"][0].prompt]])
    ring.wait_idle()
    here, there = prefill.handoffs()[-1], decode.handoffs()[-1]
    for at, stages in ((here, PREFILL_STAGES), (there, DECODE_STAGES)):
        assert [at[stage] for stage in stages] == sorted(at[stage] for stage in stages)
    assert here["asked"] < there["asked"] < there["credited"] < here["credited"], "one clock on one host"
    assert here["posted"] < here["sent"] <= here["complete"] < there["complete"] <= there["committed"]


@pytest.mark.deep
async def test_workers_that_come_back(
    model: Path, questions: Mapping[str, list[Question]], tmp_path: Path
) -> None:
    prompts = [question.prompt for question in questions["two to one"]]
    expected = [question.answer for question in questions["two to one"]]
    with running_ring(tmp_path, model=str(model), prefill=2, decode=2, options=CHUNKED) as ring:
        for _ in range(2):
            assert await ask(ring, prompts) == expected
        for role in ("decode", "prefill"):
            victim = ring.of_role(role)[0]
            victim.kill()
            victim.restart()
            ring.wait_workers()
            for _ in range(2):
                assert await ask(ring, prompts) == expected
        ring.wait_idle()
        best = "ucx" if importlib.util.find_spec("ucxx") else "tcp"
        for service in ring.workers:
            assert f"connector {best}" in service.log.read_text(), f"{service.name} took no part"
