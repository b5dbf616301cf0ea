"""A ring of workers with int8 weights gives one worker's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.models.quantization.registry import Quantization
from tests.support.clients import RingClient
from tests.support.ring import running_ring

pytestmark = pytest.mark.beside

PROMPTS = ("The router", "Paged attention is", "A KV block")


async def test_the_tokens_are_one_workers(tmp_path: Path) -> None:
    params = SamplingParams(temperature=2, seed=3, max_tokens=40, ignore_eos=True)

    def offline(quantization: Quantization) -> list[list[int]]:
        llm = LLM("demo", dtype="float32", device="cpu", num_blocks=64, quantization=quantization)
        return [list(r.outputs[0].token_ids) for r in llm.generate(list(PROMPTS), params, progress=False)]

    options = ("--quantization", "int8", "--num-blocks", "64", "--prefill-chunk", "16")
    with running_ring(tmp_path, options=options) as ring:
        async with RingClient(ring.url, "demo") as client:
            answers = [
                (await client.complete(text, temperature=2, seed=3, max_tokens=40)).token_ids
                for text in PROMPTS
            ]
        ring.wait_idle()
    assert answers == offline("int8")
    assert answers != offline("none"), "nothing was rounded"
