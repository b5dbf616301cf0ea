"""What else is in the batch changes nothing: not other requests, not preemption, not a cached prefix."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring

pytestmark = pytest.mark.beside

VOCAB = 4000


def mixed_requests(count: int, longest: int, seed: int) -> list[tuple[list[int], dict[str, object]]]:
    """Prompts of many lengths; every other one sampled with a seed of its own, the others greedy."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        fields: dict[str, object] = {"max_tokens": rng.randint(8, 40), "temperature": 0}
        if index % 2:
            fields |= {"temperature": 1.0, "seed": index, "top_p": 0.95, "top_k": 50}
        requests.append((prompt, fields))
    return requests


@pytest.mark.deep
async def test_64_at_once_get_the_tokens_they_get_alone(demo: RingClient, demo_ring: Ring) -> None:
    requests = mixed_requests(64, 300, seed=7)
    alone = [(await demo.complete(prompt, **fields)).token_ids for prompt, fields in requests]
    together = await asyncio.gather(*(demo.stream(prompt, **fields) for prompt, fields in requests))
    assert [answer.token_ids for answer in together] == alone
    assert all(answer.finish_reason == "length" for answer in together)
    demo_ring.wait_idle(2)


async def test_a_pool_too_small_preempts_and_every_answer_is_right(demo: RingClient, tmp_path: Path) -> None:
    requests = mixed_requests(16, 120, seed=3)
    for _, fields in requests:
        fields["max_tokens"] = 60
    expected = [(await demo.complete(prompt, **fields)).token_ids for prompt, fields in requests]
    small = ("--num-blocks", "24")
    with running_ring(tmp_path, decode_options=small, prefill_options=small) as ring:
        async with RingClient(ring.url, "demo") as client:
            answers = await asyncio.gather(*(client.complete(p, **fields) for p, fields in requests))
        assert [answer.token_ids for answer in answers] == expected
        decode = ring.of_role("decode")[0].metrics()
        assert decode['baton_preemptions_total{role="decode"}'] > 0
        ring.wait_idle()


async def test_a_shared_prefix_is_computed_once(demo: RingClient, demo_ring: Ring) -> None:
    rng = random.Random(11)
    prefix = [rng.randrange(VOCAB) for _ in range(1500)]
    hits = 'baton_prefix_hit_tokens_total{role="prefill"}'
    worker = demo_ring.of_role("prefill")[0]
    first = await demo.complete([*prefix, 1, 2, 3], max_tokens=8, temperature=0)
    before = worker.metrics()[hits]
    second = await demo.complete([*prefix, 4, 5, 6], max_tokens=8, temperature=0)
    again = await demo.complete([*prefix, 1, 2, 3], max_tokens=8, temperature=0)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 1500 // 16 * 16
    assert worker.metrics()[hits] - before >= 2 * second.cached_tokens
    assert again.token_ids == first.token_ids


async def test_the_same_seed_gives_the_same_answer_and_another_seed_another(demo: RingClient) -> None:
    async def sample(seed: int) -> list[int]:
        return (await demo.complete("The router", max_tokens=32, temperature=1.5, seed=seed)).token_ids

    assert await sample(1) == await sample(1)
    assert await sample(1) != await sample(2)
