"""A served model under load, and transformers' continuous batching under the same."""

from __future__ import annotations

import gc
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.gpu.bench import Bench, Section
from loadtest.shapes import SHAPES, save_unfilled
from loadtest.turns import Load, ask_loop
from tests.support.ring import running_ring

ROUNDS = 2
"""Requests for each that runs at a time."""


def measure(bench: Bench) -> list[Section]:
    scale = bench.scale
    path = save_unfilled(bench.tmp / "served", SHAPES[scale.model])
    loads = [Load(scale.input_len, scale.output_len, many, ROUNDS * many) for many in scale.concurrency]
    section = Section(
        f"Served, {scale.input_len} tokens in, {scale.output_len} out",
        (
            "concurrency",
            "Baton, tokens/s",
            "TTFT median, ms",
            "TPOT median, ms",
            "transformers, tokens/s",
            "ratio",
        ),
        notes=[
            "Both in a closed loop: Baton over HTTP, transformers' continuous batching by calls within its "
            "process, without a server.",
        ],
    )
    served = through_baton(bench, path, loads)
    beside = through_transformers(bench, path, loads)
    for load, row, other in zip(loads, served, beside, strict=True):
        rate, ttft, tpot = row
        section.rows.append(
            (
                str(load.concurrency),
                f"{rate:.0f}",
                f"{ttft * 1e3:.1f}",
                f"{tpot * 1e3:.2f}",
                f"{other:.0f}",
                f"{rate / other:.2f}",
            )
        )
    return [section]


def through_baton(bench: Bench, path: Path, loads: list[Load]) -> list[tuple[float, float, float]]:
    """Output tokens a second, and the medians of TTFT and TPOT in seconds, for each load."""
    scale = bench.scale
    chunk = 2048 if bench.device.type == "cuda" else 64
    options = {
        "--device": str(bench.device),
        "--load-format": "dummy",
        "--block-size": str(scale.block_size),
        "--max-num-seqs": str(max(scale.concurrency)),
        "--max-num-batched-tokens": str(4 * chunk),
        "--prefill-chunk": str(chunk),
        "--kv-cache-memory": str(scale.kv_bytes),
        "--max-model-len": str(scale.input_len + scale.output_len + scale.block_size),
    }
    flags = [part for option in options.items() for part in option]
    dtype = str(scale.dtype).removeprefix("torch.")
    found = []
    with running_ring(
        bench.tmp / "ring", model=str(path), prefill=0, decode=0, both=1, dtype=dtype, options=flags
    ) as ring:
        for load in loads:
            warm_up = Load(load.input_len, 2, load.concurrency, load.concurrency)
            ask_loop(path, warm_up, ring.url, seed=10_000)
            figures = ask_loop(path, load, ring.url, seed=1)
            ttft, tpot = (figures[f"{name} median, ms"] / 1e3 for name in ("TTFT", "TPOT"))
            found.append((figures["output tokens/s"], ttft, tpot))
    return found


def through_transformers(bench: Bench, path: Path, loads: list[Load]) -> list[float]:
    """Output tokens a second for each load."""
    scale = bench.scale
    config = AutoConfig.from_pretrained(path)
    with torch.device(bench.device):
        from_config: Any = AutoModelForCausalLM.from_config  # transformers' own is not typed
        model = from_config(config, dtype=scale.dtype, attn_implementation="sdpa")
    model.eval()
    config_of: Any = GenerationConfig
    wanted = config_of(max_new_tokens=scale.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching: Any = ContinuousBatchingConfig
    # By default it takes nine tenths of what memory is free: a dry run needs none of a machine's.
    cache = batching() if bench.device.type == "cuda" else batching(num_blocks=64)
    rates = []
    with model.continuous_batching_context_manager(
        generation_config=wanted, timeout=5, continuous_batching_config=cache
    ) as manager:
        for load in loads:
            prompts = torch.randint(3, config.vocab_size, (load.requests, load.input_len)).tolist()
            closed_loop(manager, prompts[: load.concurrency], load.concurrency)
            began = time.perf_counter()
            tokens = closed_loop(manager, prompts, load.concurrency)
            rates.append(tokens / (time.perf_counter() - began))
            if tokens != load.requests * load.output_len:
                raise RuntimeError(f"transformers wrote {tokens} tokens for {load}")
    del model
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def closed_loop(manager: Any, prompts: list[list[int]], concurrency: int) -> int:
    """Keeps so many requests with transformers' manager until all are answered. The answers' tokens."""
    waiting = iter(prompts)
    manager.add_requests(inputs=list(islice(waiting, concurrency)))
    tokens = answered = 0
    while answered < len(prompts):
        answer = manager.get_result(timeout=1)
        if answer is None or not answer.is_finished():
            if not manager.is_running():
                raise RuntimeError("transformers' generation ended early")
            continue
        answered += 1
        tokens += len(answer.generated_tokens)
        manager.add_requests(inputs=list(islice(waiting, 1)))
    return tokens
