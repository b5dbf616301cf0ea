"""Engine steps of quantized models, and of a model with experts."""

from __future__ import annotations

import gc
from typing import Any

import torch

from baton.engine.engine import Engine
from baton.models.quantization.registry import SCHEMES
from baton.process.options import ConfigError, ModelError
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import drive, params, sequences, spread
from loadtest.gpu.model import engine_config

TABLE, EXPERTS = "Quantized steps", "Steps of models with experts"


def measure(bench: Bench) -> None:
    """Measure every scheme that this device takes."""
    for scheme in SCHEMES:
        if scheme == "none":
            continue
        try:
            steps(bench, TABLE, "scheme", scheme, quantization=scheme)
        except (ConfigError, ModelError) as error:
            bench.results.row(TABLE, scheme=scheme, reason=f"refused: {error}"[:300])
    steps(bench, EXPERTS, "model", bench.scale.mixture, model=bench.scale.mixture)


def steps(bench: Bench, table: str, what: str, name: str, **changes: Any) -> None:
    """Add a row to ``table`` for each number of rows that decode, with ``name`` in the column ``what``.
    ``changes`` are of the engine's settings."""
    scale = bench.scale
    context = scale.contexts[0]
    longest = context + scale.new_tokens
    batches = scale.batches[:3]
    engine = Engine.from_config(engine_config(bench, longest, max(batches), **changes))
    for rows in batches:
        run = drive(engine, sequences(engine, rows, context, params(scale.new_tokens), seed=rows))
        found = {what: name, "rows": rows, "context": context, **spread(run.decoding(rows))}
        bench.results.row(table, **found)
    engine.close()
    del engine
    gc.collect()
    if bench.on_cuda:
        torch.cuda.empty_cache()
