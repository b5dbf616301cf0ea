"""The Prometheus metrics of a worker, read from the engine at each scrape, so that steps pay nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.engine.kv.block_pool import PoolStats
from baton.engine.stats import EngineStats
from baton.process.exported import counter, gauge
from baton.telemetry.handoff import Holds
from baton.telemetry.roles import CountedByRole
from baton.telemetry.stats_collector import families, gauge_family


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The state of one worker at one moment. Counts are since the process started, unless stated."""

    engine: EngineStats
    waiting_prefill_tokens: Annotated[
        int, gauge("baton_waiting_prefill_tokens", "Prompt tokens accepted and not computed yet.")
    ]
    """Prompt tokens of the engine, and of requests that wait for room at a decode worker."""
    open_handoffs: Annotated[int, gauge("baton_handoffs_open", "Handoffs that have begun and not ended.")]
    deadlines_exceeded: Annotated[
        int,
        counter("baton_deadlines_exceeded", "Requests ended here because their deadline had passed."),
    ]
    handoff_links: Annotated[
        int, gauge("baton_handoff_links", "Links that are open, those that are being fenced included.")
    ]
    handoff_control_channels: Annotated[
        int,
        gauge(
            "baton_handoff_control_channels",
            "Connections of control streams: at prefill made, at decode accepted. One for each link, and "
            "more while links are made or end.",
        ),
    ]
    handoffs_completed: Annotated[int, counter("baton_handoffs_completed", "Handoffs that went through.")]
    """Handoffs sent whole by prefill, or committed by decode."""
    handoff_stale_messages: Annotated[
        int,
        counter(
            "baton_handoff_stale_messages",
            "Messages dropped for an unknown name, an older attempt or an older epoch.",
        ),
    ]
    handoff_fences: Annotated[int, counter("baton_handoff_fences", "Links forced closed.")]
    handoffs_aborted: Mapping[str, int]
    """Handoffs given up, by reason."""
    handoff_holds: Sequence[Holds]
    """KV blocks that sends and receives pin at this moment."""
    refused_callers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Refused callers by the kind that they called as ("router", "prefill"), then by the status returned."""


class WorkerCollector(Collector):
    """A collector of the worker's metrics, all with a ``role`` label: metrics that the fields of its stats
    declare, and metrics with more labels or computed from several fields."""

    def __init__(self, counted: CountedByRole, stats: Callable[[], WorkerStats]) -> None:
        self._counted = counted
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from families(self._counted, stats)
        yield self._prefill_backlog(stats)
        yield self._blocks(stats.engine.blocks)
        yield self._gauge(
            "baton_kv_usage_ratio", "Share of KV blocks that are held, 0 to 1.", stats.engine.blocks.usage
        )
        yield self._aborts(stats)
        yield self._refused_callers(stats)
        yield from self._holds(stats.handoff_holds)

    def _prefill_backlog(self, stats: WorkerStats) -> Metric:
        rate = stats.engine.pace.prefill_tokens_per_s
        return self._gauge(
            "baton_prefill_backlog_seconds",
            "What computing the waiting prompt tokens will take, at that pace; 0 before the first prompt.",
            stats.waiting_prefill_tokens / rate if rate else 0.0,
        )

    def _blocks(self, blocks: PoolStats) -> Metric:
        family = GaugeMetricFamily(
            "baton_kv_blocks",
            "KV blocks: free, cached (evictable, findable by prefix), held (by a sequence or a transfer).",
            labels=("role", "state"),
        )
        family.add_metric((self._counted.role, "free"), blocks.free)
        family.add_metric((self._counted.role, "cached"), blocks.cached)
        family.add_metric((self._counted.role, "held"), blocks.held)
        return family

    def _aborts(self, stats: WorkerStats) -> Metric:
        family = CounterMetricFamily(
            "baton_handoffs_aborted", "Handoffs given up, by reason.", labels=("role", "reason")
        )
        for reason, total in stats.handoffs_aborted.items():
            for role, count in self._counted.split((family.name, reason), total).items():
                family.add_metric((role, reason), count)
        return family

    def _refused_callers(self, stats: WorkerStats) -> Metric:
        family = CounterMetricFamily(
            "baton_worker_refused_callers",
            "Callers that did not prove to have the cluster key, or greeted wrongly.",
            labels=("role", "caller", "status"),
        )
        for caller, statuses in stats.refused_callers.items():
            for status, total in statuses.items():
                for role, count in self._counted.split((family.name, caller, status), total).items():
                    family.add_metric((role, caller, status), count)
        return family

    def _holds(self, parts: Sequence[Holds]) -> Iterator[Metric]:
        held = sum(holds.blocks for holds in parts)
        yield self._gauge("baton_handoff_held_blocks", "KV blocks that a transfer reads or writes.", held)
        began = [holds.since for holds in parts if holds.since is not None]
        age = time.monotonic() - min(began) if began else 0.0
        yield self._gauge("baton_handoff_oldest_hold_seconds", "Age of the oldest transfer under way.", age)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return gauge_family(self._counted, name, text, value)
