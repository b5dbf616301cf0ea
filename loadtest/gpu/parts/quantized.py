"""Engine steps of quantized models, and of a model with experts, where there are such."""

from __future__ import annotations

import gc

import torch

from baton.engine.engine import Engine
from baton.models.quantization.registry import SCHEMES
from baton.models.registry import FAMILIES
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
            steps(bench, scheme)
        except (ConfigError, ModelError) as error:
            bench.results.row(TABLE, scheme=scheme, reason=f"refused: {error}"[:300])
    if not any("moe" in name.lower() or "mixtral" in name.lower() for name in FAMILIES):
        bench.results.row(EXPERTS, model="-", reason="no such model yet")


def steps(bench: Bench, scheme: str) -> None:
    scale = bench.scale
    context = scale.contexts[0]
    longest = context + scale.new_tokens
    batches = scale.batches[:3]
    engine = Engine.from_config(engine_config(bench, longest, max(batches), quantization=scheme))
    for rows in batches:
        run = drive(engine, sequences(engine, rows, context, params(scale.new_tokens), seed=rows))
        bench.results.row(TABLE, scheme=scheme, rows=rows, context=context, **spread(run.decoding(rows)))
    engine.close()
    del engine
    gc.collect()
    if bench.on_cuda:
        torch.cuda.empty_cache()
