"""Rings whose KV is FP8 give the answers of one worker, whatever their blocks, ranks and memory are like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from baton import LLM, SamplingParams
from baton.models.config import KVCacheDtype
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, running, running_routers, worker

pytestmark = pytest.mark.beside

PROMPTS = tuple(
    f"{text}: the router and what it knows of {text}" for text in ("prefill", "decode", "KV blocks")
)
FP8 = ("--kv-cache-dtype", "fp8", "--connector", "tcp")
TWO_RANKS = ("--tensor-parallel-size", "2")
LITTLE_MEMORY = (
    "--block-size",
    "8",
    "--num-blocks",
    "22",
    "--host-kv-memory",
    "16MiB",
    "--max-num-seqs",
    "3",
)
DECODES: Mapping[str, tuple[str, ...]] = {
    "small blocks, little memory": LITTLE_MEMORY,
    "two ranks": (*TWO_RANKS, "--num-blocks", "64"),
}
"""What is different about a decode worker."""
DYNAMIC = ("--kv-cache-dtype", "fp8-dynamic", "--connector", "tcp", "--block-size", "8")
BY_BLOCK = "scales by block, two ranks, little memory"


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ring]]:
    """One prefill worker, and behind it each of the decode workers."""
    tmp = tmp_path_factory.mktemp("fp8")
    chunks = ("--prefill-chunk", "16", "--num-blocks", "64")
    prefill = worker(tmp, "prefill", "prefill", "demo", *FP8, "--block-size", "16", *chunks)
    decodes = {
        name: worker(tmp, f"decode-{at}", "decode", "demo", *FP8, *options)
        for at, (name, options) in enumerate(DECODES.items())
    }
    groups = {name: [prefill, decode] for name, decode in decodes.items()}
    by_block = [
        worker(tmp, "prefill-by-block", "prefill", "demo", *DYNAMIC, *chunks),
        worker(tmp, "decode-by-block", "decode", "demo", *DYNAMIC, *LITTLE_MEMORY, *TWO_RANKS),
    ]
    groups[BY_BLOCK] = by_block
    with running([prefill, *decodes.values(), *by_block]), running_routers(tmp, "demo", groups) as rings:
        yield rings


def offline(kept_in: KVCacheDtype) -> list[list[int]]:
    llm = LLM("demo", dtype="float32", device="cpu", num_blocks=64, kv_cache_dtype=kept_in)
    params = SamplingParams(temperature=2, seed=3, max_tokens=60, ignore_eos=True)
    return [list(r.outputs[0].token_ids) for r in llm.generate(list(PROMPTS), params, progress=False)]


@pytest.fixture(scope="module")
def expected() -> Mapping[KVCacheDtype, list[list[int]]]:
    kinds: tuple[KVCacheDtype, ...] = ("auto", "fp8", "fp8-dynamic")
    answers = {kept_in: offline(kept_in) for kept_in in kinds}
    assert answers["fp8"] != answers["auto"] != answers["fp8-dynamic"], "nothing was rounded"
    return answers


@pytest.mark.parametrize("name", all_deep_but([BY_BLOCK], [*DECODES, BY_BLOCK]))
async def test_the_tokens_are_one_workers(
    rings: Mapping[str, Ring], expected: Mapping[KVCacheDtype, list[list[int]]], name: str
) -> None:
    ring = rings[name]
    async with RingClient(ring.url, "demo") as client:
        asked = [client.complete(text, temperature=2, seed=3, max_tokens=60) for text in PROMPTS]
        answers = [answer.token_ids for answer in await asyncio.gather(*asked)]
    ring.wait_idle()
    assert answers == expected["fp8-dynamic" if name == BY_BLOCK else "fp8"]
    [decode] = ring.of_role("decode")
    found = {key.partition("{")[0]: value for key, value in decode.metrics().items()}
    assert found["baton_handoffs_completed_total"] >= len(PROMPTS)
    if name == BY_BLOCK:
        [prefill] = ring.of_role("prefill")
        sent = {key.partition("{")[0]: value for key, value in prefill.metrics().items()}
        assert found["baton_handoff_received_bytes_total"] == sent["baton_handoff_sent_bytes_total"]
    if name.endswith("little memory"):
        assert found["baton_preemptions_total"] > 0
        assert found["baton_host_kv_hit_blocks_total"] > 0
