"""The engine without a server: its steps at several batch sizes, a batch of prompts as a whole, what is
compiled after it is ready, and the memory that it takes.

Steps are timed by whoever calls ``Engine.step``: scheduling, laying out, forward pass, draw and applying the
results. Answers begin half their length below the context of ``decode``'s steps, so that the medians of both
are of the same lengths.
"""

from __future__ import annotations

import gc

import torch

from baton.engine.engine import Engine
from baton.engine.options import AsyncScheduling
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import counted_compilations, drive, params, sequences, spread
from loadtest.gpu.model import engine_config

STEPS, WHOLE, COMPILED, MEMORY = "Engine steps", "A batch as a whole", "Compilations after ready", "Memory"
SAMPLINGS = {"greedy": {}, "top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95}}


def measure(bench: Bench) -> None:
    """Measure with steps launched ahead and one by one."""
    modes: dict[str, AsyncScheduling] = {"overlapped": "on", "one by one": "off"}
    for mode, scheduling in modes.items():
        engine_of(bench, mode, scheduling)


def engine_of(bench: Bench, mode: str, scheduling: AsyncScheduling) -> None:
    scale = bench.scale
    longest = scale.input_len + scale.output_len
    before = allocated(bench)
    engine = Engine.from_config(engine_config(bench, longest, None, async_scheduling=scheduling))
    memory(bench, mode, engine, before)
    with counted_compilations() as compiled:
        steps(bench, mode, engine)
        whole(bench, mode, engine)
    names = ", ".join(sorted(set(compiled))) or "none"
    bench.results.row(COMPILED, mode=mode, kernels=len(compiled), which=names[:200])
    engine.close()
    del engine
    gc.collect()
    if bench.on_cuda:
        torch.cuda.empty_cache()


def steps(bench: Bench, mode: str, engine: Engine) -> None:
    scale = bench.scale
    length = scale.contexts[0] - scale.output_len // 2
    for rows in scale.batches:
        for sampling, changes in SAMPLINGS.items():
            if sampling != "greedy" and rows != max(scale.batches):
                continue
            asked = sequences(engine, rows, length, params(scale.output_len, **changes), seed=rows)
            run = drive(engine, asked)
            bench.results.row(STEPS, mode=mode, rows=rows, sampling=sampling, **spread(run.decoding(rows)))


def whole(bench: Bench, mode: str, engine: Engine) -> None:
    scale = bench.scale
    rows = max(scale.batches)
    run = drive(engine, sequences(engine, rows, scale.input_len, params(scale.output_len), seed=10_000))
    load = f"{rows} x {scale.input_len}/{scale.output_len}"
    rates = {"tokens/s": run.tokens / run.seconds, "prompt steps": len(run.prompts())}
    prompt = rows * scale.input_len / sum(run.prompts()) if run.prompts() else None
    bench.results.row(
        WHOLE, mode=mode, load=load, seconds=run.seconds, **rates, **{"prompt tokens/s": prompt}
    )


def allocated(bench: Bench) -> int:
    return torch.cuda.mem_get_info(bench.device)[0] if bench.on_cuda else 0


def memory(bench: Bench, mode: str, engine: Engine, free_before: int) -> None:
    """Write what the engine took, with its graphs; on a machine without a device there is nothing to tell."""
    if not bench.on_cuda:
        bench.results.missing("memory after graphs", "there is no CUDA device")
        return
    free, total = torch.cuda.mem_get_info(bench.device)
    pool = engine.pool.num_blocks
    sizes = {
        "taken, GiB": (free_before - free) / 2**30,
        "in tensors, GiB": torch.cuda.memory_allocated(bench.device) / 2**30,
        "reserved by torch, GiB": torch.cuda.memory_reserved(bench.device) / 2**30,
        "free, GiB": free / 2**30,
        "of, GiB": total / 2**30,
    }
    bench.results.row(MEMORY, mode=mode, blocks=pool, **sizes)
