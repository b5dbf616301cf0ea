"""Rings whose KV is FP8 give the answers of one worker, whatever their blocks, ranks and memory are like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from baton import LLM, SamplingParams
from baton.models.config import KVCacheDtype
from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, worker

pytestmark = pytest.mark.beside

PROMPTS = tuple(
    f"{text}: the router and what it knows of {text}" for text in ("prefill", "decode", "KV blocks")
)
FP8 = ("--kv-cache-dtype", "fp8", "--connector", "tcp")
DECODES: Mapping[str, tuple[str, ...]] = {
    "small blocks, little memory": (
        *("--block-size", "8", "--num-blocks", "22", "--host-kv-memory", "16MiB", "--max-num-seqs", "3"),
    ),
    "two ranks": ("--tensor-parallel-size", "2", "--num-blocks", "64"),
}
"""What is different about a decode worker."""


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ring]]:
    """One prefill worker, and behind it each of the decode workers."""
    tmp = tmp_path_factory.mktemp("fp8")
    chunks = ("--block-size", "16", "--prefill-chunk", "16", "--num-blocks", "64")
    prefill = worker(tmp, "prefill", "prefill", "demo", *FP8, *chunks)
    decodes = {
        name: worker(tmp, f"decode-{at}", "decode", "demo", *FP8, *options)
        for at, (name, options) in enumerate(DECODES.items())
    }
    groups = {name: [prefill, decode] for name, decode in decodes.items()}
    with running([prefill, *decodes.values()]), running_routers(tmp, "demo", groups) as rings:
        yield rings


def offline(kept_in: KVCacheDtype) -> list[list[int]]:
    llm = LLM("demo", dtype="float32", device="cpu", num_blocks=64, kv_cache_dtype=kept_in)
    params = SamplingParams(temperature=2, seed=3, max_tokens=60, ignore_eos=True)
    return [list(r.outputs[0].token_ids) for r in llm.generate(list(PROMPTS), params, progress=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    answers = offline("fp8")
    assert answers != offline("auto"), "nothing was rounded"
    return answers


@pytest.mark.parametrize("name", DECODES)
async def test_the_tokens_are_one_workers(
    rings: Mapping[str, Ring], expected: list[list[int]], name: str
) -> None:
    ring = rings[name]
    async with RingClient(ring.url, "demo") as client:
        asked = [client.complete(text, temperature=2, seed=3, max_tokens=60) for text in PROMPTS]
        answers = [answer.token_ids for answer in await asyncio.gather(*asked)]
    ring.wait_idle()
    assert answers == expected
    [decode] = ring.of_role("decode")
    found = {key.partition("{")[0]: value for key, value in decode.metrics().items()}
    assert found["baton_handoffs_completed_total"] >= len(PROMPTS)
    if name.endswith("little memory"):
        assert found["baton_preemptions_total"] > 0
        assert found["baton_host_kv_hit_blocks_total"] > 0
