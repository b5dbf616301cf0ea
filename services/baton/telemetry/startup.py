"""How long a start takes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
"""
- import: torch and what needs it, where the start begins before that (a worker, not ``LLM``)
- config: the model's directory, its config, and for ``LLM`` the tokenizer
- ranks: starting the other ranks, and waiting until they have loaded and met
- kernels: finding those of the CPU, or building them
- weights: making the parameters and filling them
- pack: laying weights out as the kernels of the CPU read them
- drafter: whatever guesses tokens ahead
- pool: finding out how many KV blocks there is room for, and taking the memory
- warm_up: the first forward passes; on CUDA they build the kernels that are not in triton's cache
- graphs: recording decode steps
- host_tier: memory for evicted blocks
- connector: the transports of KV blocks, and their ports
"""

OTHER = "other"
"""What is in no phase."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of each phase that there was, in order, and of all else; they sum to ``total``."""

    phases: Mapping[str, float]
    total: float

    def __str__(self) -> str:
        """With what rounds to more than nothing."""
        told = ((name, f"{seconds:.2f}") for name, seconds in self.phases.items())
        parts = ", ".join(f"{name} {seconds}" for name, seconds in told if float(seconds))
        return f"{self.total:.2f} s ({parts})"


class StartClock:
    """Runs from when it is made. It is handed down to whatever does a part of the start; one phase at a
    time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()
        self._seconds: dict[Phase, float] = {}
        self._running: Phase | None = None

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What runs inside belongs to this phase; a phase may come again."""
        assert self._running is None, f"{name} within {self._running}"
        self._running, began = name, self._now()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def times(self) -> StartTimes:
        """Up to now."""
        total = self._now() - self._began
        phases: dict[str, float] = dict(self._seconds.items())
        return StartTimes(phases | {OTHER: total - sum(self._seconds.values())}, total)


class StartCollector(Collector):
    """A worker's start as a metric."""

    def __init__(self, role: str, times: StartTimes) -> None:
        self._role = role
        self._times = times

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_startup_seconds",
            "What the start took, by phase; their sum is the whole of it.",
            labels=("role", "phase"),
        )
        for phase, seconds in self._times.phases.items():
            family.add_metric((self._role, phase), seconds)
        yield family
