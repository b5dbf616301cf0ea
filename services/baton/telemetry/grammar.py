"""What router and workers export of grammars: read at each scrape, so that nobody pays but who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.telemetry.roles import CountedByRole


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What a compiler of grammars has done since it was made."""

    compiled: int = 0
    compile_seconds: float = 0.0
    """Trials included, those of refused grammars too."""
    cache_hits: int = 0
    cache_misses: int = 0
    refused: int = 0

    def __add__(self, other: GrammarStats) -> GrammarStats:
        return GrammarStats(
            self.compiled + other.compiled,
            self.compile_seconds + other.compile_seconds,
            self.cache_hits + other.cache_hits,
            self.cache_misses + other.cache_misses,
            self.refused + other.refused,
        )


@dataclass(frozen=True, slots=True)
class MaskStats:
    """What masks have cost an engine so far."""

    steps: int = 0
    """Steps with guided sequences."""
    masks: int = 0
    seconds: float = 0.0
    """Computing masks."""


class GrammarCollector(Collector):
    """The metrics of one process, with its role as a label."""

    def __init__(
        self,
        counted: CountedByRole,
        grammars: Callable[[], GrammarStats],
        masks: Callable[[], MaskStats] | None = None,
    ) -> None:
        """``masks`` None: this process computes none."""
        self._counted = counted
        self._grammars = grammars
        self._masks = masks

    def collect(self) -> Iterator[Metric]:
        stats = self._grammars()
        yield self._counter("baton_grammars_compiled", "Grammars compiled.", stats.compiled)
        yield self._counter(
            "baton_grammars_refused", "Grammars that are invalid or beyond the limits.", stats.refused
        )
        yield self._counter(
            "baton_grammar_compile_seconds",
            "Time for compiling, that of refused grammars included.",
            stats.compile_seconds,
        )
        yield self._counter("baton_grammar_cache_hits", "Grammars found compiled.", stats.cache_hits)
        yield self._counter("baton_grammar_cache_misses", "Grammars not found.", stats.cache_misses)
        if self._masks is not None:
            yield from self._mask_metrics(self._masks())

    def _mask_metrics(self, stats: MaskStats) -> Iterator[Metric]:
        yield self._counter("baton_guided_steps", "Steps with guided sequences.", stats.steps)
        yield self._counter("baton_guided_masks", "Masks computed, one for a token.", stats.masks)
        yield self._counter("baton_guided_mask_seconds", "Time for computing masks.", stats.seconds)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("role",))
        for role, count in self._counted.split((name,), value).items():
            family.add_metric((role,), count)
        return family
