"""A workload for `LLM`: token ids, and parameters for answers of the lengths asked for."""

from __future__ import annotations

from collections.abc import Sequence

from baton.bench.workload.items import Item
from baton.bench.workload.vocabulary import Vocabulary
from baton.engine.llm import LLM
from baton.request.params import SamplingParams


def prompts_for(vocabulary: Vocabulary, items: Sequence[Item]) -> list[list[int]]:
    """Return the prompts as token ids."""
    return [vocabulary.ids(item) for item in items]


def params_for(items: Sequence[Item]) -> list[SamplingParams]:
    """Return greedy parameters that make each answer exactly as long as its item says."""
    return [SamplingParams(max_tokens=item.output_tokens, temperature=0, ignore_eos=True) for item in items]


def generated(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, progress: bool) -> int:
    """Answer all prompts; return the number of generated tokens. Raises RuntimeError for an answer that could
    not go on."""
    results = llm.generate(prompts, params, progress=progress)
    outputs = [output for result in results for output in result.outputs]
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return sum(len(output.token_ids) for output in outputs)
