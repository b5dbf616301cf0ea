"""One prompt as long as the model takes, and the steps that decode behind it."""

from __future__ import annotations

import time

from baton.engine.engine import Engine
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import drive, params, sequences, spread
from loadtest.gpu.model import engine_config

TABLE, STEPS = "One long prompt", "Steps behind it"
SPARE_S = 8.0


def measure(bench: Bench) -> None:
    """Measure one request; it is cut short before the part's limit."""
    scale = bench.scale
    length = scale.long_context - scale.new_tokens - scale.block_size
    engine = Engine.from_config(engine_config(bench, scale.long_context, 1))
    [asked] = sequences(engine, 1, length, params(scale.new_tokens))
    run = drive(engine, [asked], time.monotonic() + bench.left - SPARE_S)
    computed = sum(step.prompt_tokens for step in run.steps)
    seconds = sum(run.prompts())
    rates = {"seconds": seconds, "tokens/s": computed / seconds, "steps": len(run.prompts())}
    bench.results.row(TABLE, tokens=length, computed=computed, **rates)
    bench.results.row(STEPS, context=length, **spread(run.decoding(1)))
    if computed < length:
        bench.results.missing("the rest of the prompt", "the time of this part was over")
    engine.close()
