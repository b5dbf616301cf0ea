"""An engine driven step by step in this process, with the time of each step."""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence

LOW_ID = 3
"""The least token id of a prompt: those below are special."""


@dataclass(frozen=True)
class Step:
    """One step, as its caller saw it."""

    seconds: float
    rows: int
    """Sequences that got tokens."""
    tokens: int
    prompt_tokens: int
    """Tokens of prompts that were computed."""


@dataclass
class Run:
    """All steps of a run."""

    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    def decoding(self, rows: int) -> list[float]:
        """Return the seconds of steps in which exactly ``rows`` sequences decoded and no prompt was
        computed."""
        return [s.seconds for s in self.steps if s.rows == rows and not s.prompt_tokens]

    def prompts(self) -> list[float]:
        """Return the seconds of steps that computed tokens of prompts."""
        return [s.seconds for s in self.steps if s.prompt_tokens]


def params(max_tokens: int, **changes: Any) -> ResolvedSampling:
    """Return greedy sampling of exactly ``max_tokens`` tokens, but for ``changes``."""
    wanted: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **changes}
    return ResolvedSampling(max_tokens=max_tokens, **wanted)


def sequences(
    engine: Engine, count: int, length: int, wanted: ResolvedSampling, seed: int = 0
) -> list[Sequence]:
    """Return requests with prompts of random tokens."""
    rng = random.Random(seed)
    vocab = engine.vocab_size
    prompts = [[rng.randrange(LOW_ID, vocab) for _ in range(length)] for _ in range(count)]
    return [Sequence(f"{seed}-{i}", 0, prompt, wanted) for i, prompt in enumerate(prompts)]


def drive(engine: Engine, asked: Items[Sequence], deadline: float | None = None) -> Run:
    """Add the requests and step until all are answered. ``deadline``: cancel what is left at this time of
    the monotonic clock."""
    for sequence in asked:
        engine.add(sequence)
    run = Run()
    began = time.perf_counter()
    while engine.has_work:
        run.steps.append(one_step(engine))
        if deadline is not None and time.monotonic() > deadline:
            engine.cancel_all_of("")
            while engine.has_work:
                engine.step()
    run.seconds = time.perf_counter() - began
    return run


def one_step(engine: Engine) -> Step:
    before = engine.stats().work.prompt_tokens
    began = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - began
    tokens = [len(output.new_tokens) for output in outputs if output.new_tokens]
    return Step(seconds, len(tokens), sum(tokens), engine.stats().work.prompt_tokens - before)


def percentile(values: Items[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Items[float]) -> dict[str, float | int | None]:
    """Return the cells of a row that tell of times, given in seconds."""
    if not values:
        return {"steps": 0, "p50, ms": None, "p90, ms": None, "p99, ms": None, "most, ms": None}
    times = {"p50, ms": statistics.median(values), "p90, ms": percentile(values, 0.9)}
    times |= {"p99, ms": percentile(values, 0.99), "most, ms": max(values)}
    return {"steps": len(values), **{name: value * 1e3 for name, value in times.items()}}


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Yield a list that gets the name of every Triton kernel that is compiled, or loaded from the cache,
    within."""
    names: list[str] = []
    if importlib.util.find_spec("triton") is None:
        yield names
        return
    from triton import knobs

    def compiled(*_: object, **told: Any) -> None:
        names.append(str(told.get("repr", "a kernel")))

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = compiled
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
