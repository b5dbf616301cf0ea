"""The whole engine in bfloat16 on the device, beside the same on the CPU: prompts in chunks, replayed decode
steps, output head and draw.

The reference is the CPU in float32. What bfloat16 rounds away differs from device to device, but not how
much: the device's error may be as large as the CPU's own in bfloat16, and half as much again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

from baton.core.logprobs import TokenDetails
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.hub import DEMO, resolve_model
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import LOW_ID, params
from loadtest.shapes import SHAPES, save_config, save_weights

SCORES, ANSWERS = "Log-probabilities in bfloat16", "Answers in bfloat16"
LENGTHS = (3, 17, 64, 65, 130, 300)
NEW_TOKENS = 32


@dataclass(frozen=True)
class Told:
    """An engine's tokens and log-probabilities for one prompt."""

    tokens: list[int]
    chosen: list[float]
    """The log-probability of each of its own tokens."""


def measure(bench: Bench) -> None:
    """Compare the demo model and a random one."""
    scale = bench.scale
    small = save_weights(save_config(bench.tmp / scale.small_model, SHAPES[scale.small_model]))
    lengths, new_tokens = (LENGTHS[:3], 6) if bench.dry else (LENGTHS, NEW_TOKENS)
    for name, path in (("demo", resolve_model(DEMO)), (scale.small_model, small)):
        compare(bench, name, path, lengths, new_tokens)


def compare(bench: Bench, name: str, path: Path, lengths: Items[int], new_tokens: int) -> None:
    rng = random.Random(0)
    reference = engine(path, "cpu", "float32")
    top = min(reference.vocab_size, 4000)
    prompts = [[rng.randrange(LOW_ID, top) for _ in range(length)] for length in lengths]
    answers = answered(reference, prompts, new_tokens)
    forced = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    true = scored(reference, forced)
    devices = {"the CPU": "cpu", "the device": str(bench.device)}
    errors: dict[str, float] = {}
    own: dict[str, list[Told]] = {}
    for label, device in devices.items():
        other = engine(path, device, "bfloat16")
        errors[label] = root_mean_square(true, scored(other, forced))
        own[label] = answered(other, prompts, new_tokens)
        other.close()
    bench.results.row(
        SCORES,
        model=name,
        positions=sum(map(len, true)),
        **{f"error of {label}": error for label, error in errors.items()},
        **{"times the CPU's error": errors["the device"] / max(errors["the CPU"], 1e-9)},
    )
    for label, told in own.items():
        same = [common(a.tokens, b.tokens) for a, b in zip(answers, told, strict=True)]
        pairs = [(a.chosen[:n], b.chosen[:n]) for a, b, n in zip(answers, told, same, strict=True)]
        error = root_mean_square([a for a, _ in pairs], [b for _, b in pairs])
        whole = sum(n == new_tokens for n in same)
        counts = {"answers": len(same), "equal to float32's": whole, "tokens before they part": sum(same)}
        bench.results.row(ANSWERS, model=name, on=label, **counts, error=error)


def engine(path: Path, device: str, dtype: str) -> Engine:
    """Return an engine that computes prompts in chunks of 64 tokens."""
    return Engine.from_config(
        EngineConfig(
            path,
            dtype=dtype,
            device=device,
            num_blocks=256,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            prefill_chunk=64,
            prefix_caching=False,
        )
    )


def answered(engine: Engine, prompts: Items[list[int]], new_tokens: int) -> list[Told]:
    """Return greedy answers, all computed at the same time."""
    asked = [Sequence(f"a{i}", 0, p, params(new_tokens, logprobs=0)) for i, p in enumerate(prompts)]
    details = run(engine, asked)
    chosen = [[d.logprobs.chosen[0] for d in details[s] if d.logprobs is not None] for s in asked]
    return [Told(s.output_ids, scores) for s, scores in zip(asked, chosen, strict=True)]


def scored(engine: Engine, prompts: Items[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of the prompts behind the first."""
    asked = [Sequence(f"s{i}", 0, p, params(1, prompt_logprobs=0)) for i, p in enumerate(prompts)]
    details = run(engine, asked)
    found = [next(d.prompt_logprobs for d in details[s] if d.prompt_logprobs is not None) for s in asked]
    return [list(scores.chosen) for scores in found]


def run(engine: Engine, asked: Items[Sequence]) -> dict[Sequence, list[TokenDetails]]:
    details: dict[Sequence, list[TokenDetails]] = {sequence: [] for sequence in asked}
    for sequence in asked:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.details is not None:
                details[output.seq].append(output.details)
    return details


def common(one: Items[int], other: Items[int]) -> int:
    """Return how many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def root_mean_square(one: Items[Items[float]], other: Items[Items[float]]) -> float:
    """Return the root mean square of the differences, all positions together."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / max(1, len(pairs)))
