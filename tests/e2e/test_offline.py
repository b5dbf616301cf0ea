"""`LLM` gives the tokens that a ring gives."""

from __future__ import annotations

import pytest

from baton import LLM, SamplingParams
from tests.support.clients import RingClient

pytestmark = pytest.mark.beside


@pytest.mark.parametrize("temperature", [0, 1.2])
async def test_offline_is_the_rings_answer(demo: RingClient, temperature: float) -> None:
    prompts = ["The router", "Paged attention is"]
    llm = LLM("demo", dtype="float32", num_blocks=64)
    params = SamplingParams(
        temperature=temperature, seed=11, max_tokens=24, ignore_eos=True, frequency_penalty=0.5
    )
    offline = llm.generate(prompts, params, progress=False)
    for prompt, result in zip(prompts, offline, strict=True):
        online = await demo.complete(
            prompt, temperature=temperature, seed=11, max_tokens=24, frequency_penalty=0.5
        )
        assert result.outputs[0].text == online.text
        assert list(result.outputs[0].token_ids) == online.token_ids
