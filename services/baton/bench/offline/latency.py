"""``baton bench latency``: the time that one batch takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.bench.config import LatencyConfig
from baton.bench.offline.workload import generated, params_for, prompts_for
from baton.bench.spread import Spread
from baton.bench.workload.items import fit
from baton.bench.workload.synthetic import random_lengths
from baton.bench.workload.vocabulary import Vocabulary
from baton.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Latencies in seconds."""

    whole: Spread
    """The time from the first step to the batch's last token."""
    per_token: Spread
    """The time of the whole batch divided by the length of an answer."""
    repeats: tuple[float, ...]


def latency(llm: LLM, config: LatencyConfig) -> LatencyResult:
    """Time the batch again and again. Each repeat has prompts of its own, so that none finds its prefixes in
    the prefix cache."""
    vocabulary = Vocabulary(llm.tokenizer)
    times = [_once(llm, vocabulary, config, number) for number in range(config.warmups + config.repeats)]
    kept = tuple(times[config.warmups :])
    whole, per_token = Spread.of(kept), Spread.of([one / config.output_len for one in kept])
    assert whole is not None and per_token is not None
    return LatencyResult(whole, per_token, kept)


def _once(llm: LLM, vocabulary: Vocabulary, config: LatencyConfig, number: int) -> float:
    seed = config.seed * 1_000_003 + number
    items = random_lengths(config.batch_size, config.input_len, config.output_len, 0, seed)
    items = fit(items, llm.model.max_model_len).items
    prompts, params = prompts_for(vocabulary, items), params_for(items)
    began = time.perf_counter()
    generated(llm, prompts, params, progress=False)
    return time.perf_counter() - began
