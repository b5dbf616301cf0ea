"""The duration of a start, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "import",
    "config",
    "ranks",
    "kernels",
    "weights",
    "pack",
    "drafter",
    "pool",
    "warm_up",
    "graphs",
    "host_tier",
    "connector",
]
"""The phases of a start:

- import: importing torch and what needs it, where the start begins before that (a worker, not ``LLM``)
- config: finding and reading the model's directory and config, and for ``LLM`` the tokenizer
- ranks: starting the other ranks, and waiting until they have loaded and connected
- kernels: finding or building the CPU kernels
- weights: allocating and loading the parameters
- pack: packing weights into the layout of the CPU kernels
- drafter: loading what drafts tokens for speculative decoding
- pool: measuring how many KV blocks fit, and allocating them
- warm_up: the first requests; on CUDA, before them, steps that build the kernels not in triton's cache
- graphs: capturing the CUDA graphs of decode steps
- host_tier: memory for evicted blocks
- connector: the transports of KV blocks, and their ports
"""

OTHER = "other"
"""The name of the time that is in no phase."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The seconds of each phase that occurred, in order, and of the rest (``OTHER``). They sum to
    ``total``."""

    phases: Mapping[str, float]
    total: float

    def __str__(self) -> str:
        """Leaves out phases that round to 0.00 s."""
        told = ((name, f"{seconds:.2f}") for name, seconds in self.phases.items())
        parts = ", ".join(f"{name} {seconds}" for name, seconds in told if float(seconds))
        return f"{self.total:.2f} s ({parts})"


class StartClock:
    """A clock of a start. It runs from its construction and is passed to each part of the start; one phase at
    a time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()
        self._seconds: dict[Phase, float] = {}
        self._running: Phase | None = None

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the time inside the context as this phase. A phase may be entered again."""
        assert self._running is None, f"{name} within {self._running}"
        self._running, began = name, self._now()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def times(self) -> StartTimes:
        """Return the times up to now."""
        total = self._now() - self._began
        phases: dict[str, float] = dict(self._seconds.items())
        return StartTimes(phases | {OTHER: total - sum(self._seconds.values())}, total)
