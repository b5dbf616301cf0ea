"""What a step with drafts costs beside one without, and how many tokens it yields.

The weights are random, so what is accepted says nothing: what counts is the time of a step that verifies.
Answers are of two tokens only, in any order, so that n-grams find drafts in every step.
"""

from __future__ import annotations

import gc

import torch

from baton.engine.engine import Engine
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import LOW_ID, drive, params, sequences, spread
from loadtest.gpu.model import engine_config

TABLE = "Steps with drafts"
ALLOWED = (LOW_ID, LOW_ID + 1)


def measure(bench: Bench) -> None:
    """Measure without drafts and with n-grams."""
    for method in ("none", "ngram"):
        engine_of(bench, method)


def engine_of(bench: Bench, method: str) -> None:
    scale = bench.scale
    context = scale.contexts[0]
    config = engine_config(
        bench, context + scale.new_tokens, max(scale.speculative_batches), speculative_method=method
    )
    engine = Engine.from_config(config)
    for rows in scale.speculative_batches:
        asked = sequences(
            engine, rows, context, params(scale.new_tokens, allowed_token_ids=ALLOWED), seed=rows
        )
        before = engine.stats().speculation
        run = drive(engine, asked)
        drafts = engine.stats().speculation.minus(before)
        decoding = [step for step in run.steps if step.rows == rows and not step.prompt_tokens]
        yielded = sum(step.tokens for step in decoding) / max(1, len(decoding)) / rows
        counts = {"drafted": drafts.drafted_tokens, "accepted": drafts.accepted_tokens}
        bench.results.row(
            TABLE,
            method=method,
            rows=rows,
            context=context,
            **spread([step.seconds for step in decoding]),
            **{"tokens a row and step": yielded},
            **counts,
            **{"drafting, ms a step": drafts.drafting_seconds / max(1, len(run.steps)) * 1e3},
        )
    engine.close()
    del engine
    gc.collect()
    if bench.on_cuda:
        torch.cuda.empty_cache()
