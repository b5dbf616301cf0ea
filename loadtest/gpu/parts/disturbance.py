"""The gaps between tokens of sequences that decode, while long prompts come to the same worker (role
``both``), with and without a bound on the prompt tokens of such steps."""

from __future__ import annotations

import time

from baton.engine.engine import Engine
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import one_step, params, sequences, spread
from loadtest.gpu.model import engine_config
from loadtest.gpu.scale import Scale

TABLE = "Gaps between tokens"
BOUNDS = (None, 2048, 512)
SPARE = 6
"""Steps more for each prompt than its chunks: where steps overlap, tokens are known late."""


def measure(bench: Bench) -> None:
    """Measure with each bound, on one engine."""
    bench.results.note(
        TABLE,
        "All sequences decode in every step: a gap is the time of a step. Alone: no prompt is there.",
    )
    scale = bench.scale
    count, length = scale.disturbing
    longest = max(length, scale.contexts[0] + answer_tokens(scale)) + scale.new_tokens
    engine = Engine.from_config(engine_config(bench, longest, scale.disturbed_rows + count))
    for bound in BOUNDS:
        engine.set_mixed_prefill_tokens(bound)
        gaps(bench, engine, bound)
    engine.close()


def answer_tokens(scale: Scale) -> int:
    """Return the tokens that an answer has, so that none ends before the last prompt is computed."""
    count, length = scale.disturbing
    chunks = -(-length // min(length, *(bound for bound in BOUNDS if bound is not None)))
    return scale.new_tokens + count * (chunks + SPARE)


def gaps(bench: Bench, engine: Engine, bound: int | None) -> None:
    scale = bench.scale
    count, length = scale.disturbing
    rows = scale.disturbed_rows
    for sequence in sequences(engine, rows, scale.contexts[0], params(answer_tokens(scale))):
        engine.add(sequence)
    alone, beside, waits = list[float](), list[float](), list[float]()
    while engine.stats().waiting_prefill_tokens:
        engine.step()
    while len(alone) < scale.new_tokens:
        alone.append(one_step(engine).seconds)
    for number in range(count):
        began = time.perf_counter()
        [prompt] = sequences(engine, 1, length, params(1), seed=number + 1)
        engine.add(prompt)
        while not prompt.output_ids:
            beside.append(one_step(engine).seconds)
        waits.append(time.perf_counter() - began)
    engine.cancel_all_of("")
    while engine.has_work:
        engine.step()
    name = "none" if bound is None else str(bound)
    bench.results.row(TABLE, bound=name, rows=rows, beside="alone", **spread(alone))
    load = f"{count} prompts of {length}"
    first = {"prompt's first token, ms": sum(waits) / len(waits) * 1e3}
    bench.results.row(TABLE, bound=name, rows=rows, beside=load, **spread(beside), **first)
