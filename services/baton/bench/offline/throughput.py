"""``baton bench throughput``: the time that a whole workload takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.bench.offline.workload import generated, params_for, prompts_for
from baton.bench.workload.choice import make_items
from baton.bench.workload.config import WorkloadConfig
from baton.bench.workload.items import fit
from baton.bench.workload.vocabulary import Vocabulary
from baton.engine.llm import LLM

_WARMUP = WorkloadConfig(num_prompts=2, input_len=16, output_len=4, seed=-1)


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """The figures of a run in which all requests are there from the start; a trace's times are ignored."""

    requests: int
    left_out: int
    """Requests left out because they exceed the model's context."""
    duration: float
    prompt_tokens: int
    output_tokens: int

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.duration

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration


def throughput(llm: LLM, config: WorkloadConfig, *, progress: bool = True) -> ThroughputResult:
    """Answer the workload, after two small requests to warm up. Raises WorkloadError."""
    vocabulary = Vocabulary(llm.tokenizer)
    fitted = fit(make_items(config, llm.tokenizer), llm.model.max_model_len)
    warmup = make_items(_WARMUP, llm.tokenizer)
    generated(llm, prompts_for(vocabulary, warmup), params_for(warmup), progress=False)
    prompts, params = prompts_for(vocabulary, fitted.items), params_for(fitted.items)
    began = time.perf_counter()
    output_tokens = generated(llm, prompts, params, progress=progress)
    duration = time.perf_counter() - began
    prompt_tokens = sum(map(len, prompts))
    return ThroughputResult(len(prompts), fitted.left_out, duration, prompt_tokens, output_tokens)
