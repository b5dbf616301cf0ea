"""A model split over real rank processes, against transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

NEW_TOKENS = 24
LEAST_MARGIN = 1e-3
"""Between the best and the second-best logit: what sums in another order may not turn."""

SPLITS = {
    "tp2-llama": ("llama", 2, 1),
}


def prompts_for(path: Path, lengths: tuple[int, ...], seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, what transformers answers) of each length; none whose answer hangs on a hair."""
    rng = random.Random(seed)
    drawn = []
    for length in lengths:
        margin = 0.0
        while margin < LEAST_MARGIN:
            prompt = [rng.randrange(250) for _ in range(length)]
            answer, margin = oracle_greedy(path, prompt, NEW_TOKENS)
        drawn.append((prompt, answer))
    return drawn


@pytest.fixture(scope="module", params=SPLITS)
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Path]]:
    name, tp, pp = SPLITS[request.param]
    path = TINY_MODELS[name](tmp_path_factory.mktemp("models") / name)
    llm = LLM(
        str(path),
        dtype="float32",
        device="cpu",
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefill_chunk=32,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
    )
    yield llm, path
    llm.close()


def test_answers_are_those_of_transformers(split: tuple[LLM, Path]) -> None:
    """Prompts in chunks, and more of them than the pool has blocks for at a time."""
    llm, path = split
    drawn = prompts_for(path, (1, 5, 16, 17, 90, 200, 260))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    results = llm.generate([prompt for prompt, _ in drawn], params, progress=False)
    for result, (_, answer) in zip(results, drawn, strict=True):
        assert list(result.outputs[0].token_ids) == answer
