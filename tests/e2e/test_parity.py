"""The ring, one worker and transformers give the same tokens, for every family of models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.beside

PROMPTS = 20
LONGEST = 600
NEW_TOKENS = 48
MIN_MARGIN = 2e-4
"""A prompt whose answer hangs on two logits closer than this is drawn again: there float32 sums in another
order may rightly choose the other token."""


def draw_prompts(path: Path, seed: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, oracle's answer) pairs: lengths from 1 to LONGEST, both ends included."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, LONGEST] + [rng.randint(1, LONGEST) for _ in range(PROMPTS - 6)]
    drawn = []
    for length in lengths:
        while True:
            prompt = [rng.randrange(256) for _ in range(length)]
            answer, margin = oracle_greedy(path, prompt, NEW_TOKENS)
            if margin > MIN_MARGIN:
                break
        drawn.append((prompt, answer))
    return drawn


async def ask_all(ring: Ring, model: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    async with RingClient(ring.url, model) as client:
        answers = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0) for p in prompts]
        return [answer.token_ids for answer in await asyncio.gather(*answers)]


@pytest.mark.parametrize("name", all_deep_but(1, sorted(TINY_MODELS)))
async def test_ring_equals_one_worker_equals_transformers(name: str, tmp_path: Path) -> None:
    path = TINY_MODELS[name](tmp_path / name)
    drawn = draw_prompts(path, seed=1)
    prompts = [prompt for prompt, _ in drawn]
    expected = [answer for _, answer in drawn]
    # Chunks and pools small enough that long prompts take several steps and several messages.
    options = ("--prefill-chunk", "128", "--num-blocks", "512")
    with running_ring(tmp_path / "ring", model=str(path), options=options) as ring:
        assert await ask_all(ring, name, prompts) == expected
        committed = [
            w.metrics()['baton_handoffs_completed_total{role="decode"}'] for w in ring.of_role("decode")
        ]
        assert committed == [PROMPTS], "every request must have gone through the handoff"
        ring.wait_idle()
    one = LLM(str(path), dtype="float32", device="cpu", prefill_chunk=128, num_blocks=512)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    results = one.generate(prompts, params, progress=False)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
