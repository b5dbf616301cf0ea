"""Placement with real processes: a second turn goes where the first one is, and a burst is computed on both
sides of the ring. The answers are transformers', as those of one worker are (``test_parity``)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, Service, running, running_routers, worker
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

MODEL = "llama"
NEW_TOKENS = 24
QUERIED = "baton_prefix_queried_tokens_total"
MIN_MARGIN = 2e-4
"""As in ``test_parity``: below it float32 sums in another order may rightly choose the other token."""


@dataclass(frozen=True)
class Rings:
    """Routers with different options before the same workers."""

    path: Path
    split: Ring
    """Two prefill workers and a decode worker; prompts are always handed on."""
    conditional: Ring
    """One of the prefill workers and the decode worker."""


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rings]:
    tmp = tmp_path_factory.mktemp("placement")
    path = TINY_MODELS[MODEL](tmp / MODEL)
    prefills = [worker(tmp, f"prefill-{n}", "prefill", str(path)) for n in range(2)]
    decode = worker(tmp, "decode", "decode", str(path))
    workers = [*prefills, decode]
    with (
        running(workers),
        running_routers(tmp, str(path), {"split": workers}) as split,
        running_routers(
            tmp, str(path), {"conditional": [prefills[0], decode]}, disaggregation="conditional"
        ) as conditional,
    ):
        yield Rings(path, split["split"], conditional["conditional"])


def counted(service: Service, name: str) -> float:
    return sum(value for key, value in service.metrics().items() if key.startswith(name))


def draw(rng: random.Random, path: Path, begins: list[int], more: int) -> tuple[list[int], list[int]]:
    """A prompt that begins like this, and what transformers answer."""
    while True:
        prompt = begins + [rng.randrange(256) for _ in range(more)]
        answer, margin = oracle_greedy(path, prompt, NEW_TOKENS)
        if margin > MIN_MARGIN:
            return prompt, answer


async def test_each_next_turn_goes_where_the_ones_before_are(rings: Rings) -> None:
    rng, ring = random.Random(1), rings.split
    prefills = ring.of_role("prefill")
    async with RingClient(ring.url, MODEL) as client:
        for number in range(8):  # so that both have measured themselves, warm
            await client.complete([number] * 500, max_tokens=2)
        for _ in range(2):  # conversations
            said: list[int] = []
            computed_by: list[str] = []
            for turn, more in enumerate((600, 50, 50)):
                before = {w.name: counted(w, QUERIED) for w in prefills}
                prompt, answer = draw(rng, rings.path, said, more)
                told = await client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0)
                assert told.token_ids == answer
                computed_by += [w.name for w in prefills if counted(w, QUERIED) > before[w.name]]
                # At least all that this worker has seen of it before: the prompt of the first turn.
                assert not turn or told.cached_tokens >= 592
                said = prompt + answer
                await asyncio.sleep(0.6)  # a heartbeat: the blocks are known
            assert len(computed_by) == 3 and len(set(computed_by)) == 1
    ring.wait_idle()


async def test_a_burst_is_computed_on_both_sides(rings: Rings) -> None:
    rng, ring = random.Random(2), rings.conditional
    drawn = [draw(rng, rings.path, [], 500) for _ in range(12)]
    [decode] = ring.of_role("decode")
    before = counted(decode, "baton_handoffs_completed_total")
    async with RingClient(ring.url, MODEL) as client:
        asked = (client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0) for prompt, _ in drawn)
        told = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in told] == [answer for _, answer in drawn]
    handed_on = counted(decode, "baton_handoffs_completed_total") - before
    assert 0 < handed_on < len(drawn)
    ring.wait_idle()
