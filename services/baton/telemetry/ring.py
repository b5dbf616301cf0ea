"""Metrics of the workers that a router is connected to, from their last load reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.telemetry.pairs import HandoffTally, WorkerPair


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it."""

    address: str
    role: str
    ready: bool
    draining: bool
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    open_handoffs: int
    ejected: bool = False
    refused: bool = False
    """Whether the worker serves something else than the router does."""
    prompt_tokens: int = 0
    """The prompt tokens that it has computed since it started."""
    generated_tokens: int = 0
    """The tokens that it has sampled since it started."""
    drained: bool = False
    """Whether the worker is not ready because it has drained."""
    waiting_tokens: int = 0
    """Prompt tokens that are accepted and not computed."""
    blocks_reserved: int = 0
    """Blocks promised to handoffs and not bound yet; they are among the free and the cached."""
    seats: int = 0
    """Most sequences that run at once."""
    block_bytes: int = 0
    """The size of a block on all ranks together."""
    kv_groups: tuple[str, ...] = ()
    """What each KV group keeps, such as ``full`` or ``window 4096``."""
    blocks_findable: tuple[int, ...] = ()
    """The blocks that the worker's prefix cache can find, held ones included, for each KV group, as far as
    the router's index has room for them."""
    link_bytes_per_s: float = 0.0
    """The goodput of one link while something is sent on it, as measured lately; 0.0: not yet."""


@dataclass(frozen=True, slots=True)
class RingSource:
    """The workers of one model."""

    model: str
    views: Callable[[], list[WorkerView]]
    ejections: Callable[[], Mapping[str, int]]
    """The number of ejections so far, by reason."""
    handoffs: Callable[[], HandoffTally] = HandoffTally
    """The handoffs so far."""
    open_handoffs: Callable[[], Mapping[WorkerPair, int]] = dict
    """The requests that were given to a pair and that decode has not taken over."""
    unlinked: Callable[[], Mapping[str, int]] = dict
    """The pairs of ready workers that can never be linked, by the field in which they differ."""


class RingCollector(Collector):
    """Exports one series per worker that discovery knows, or that still finishes its requests."""

    def __init__(self, sources: Sequence[RingSource]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        labels = ("worker", "role", "model")
        ready = GaugeMetricFamily("baton_worker_ready", "Whether the worker's stream is up.", labels=labels)
        draining = GaugeMetricFamily(
            "baton_worker_draining", "Whether it ends when what it has is done.", labels=labels
        )
        ejected = GaugeMetricFamily(
            "baton_worker_ejected",
            "Whether it gets no requests for a while, as it failed too often or is slow.",
            labels=labels,
        )
        refused = GaugeMetricFamily(
            "baton_worker_refused",
            "Whether it is not used, as it serves another model or has another tokenizer.",
            labels=labels,
        )
        running = GaugeMetricFamily("baton_worker_sequences_running", "Running there.", labels=labels)
        waiting = GaugeMetricFamily("baton_worker_sequences_waiting", "Waiting there.", labels=labels)
        handoffs = GaugeMetricFamily("baton_worker_handoffs_open", "Open there.", labels=labels)
        blocks = GaugeMetricFamily(
            "baton_worker_kv_blocks", "KV blocks there: free, cached, held.", labels=(*labels, "state")
        )
        for model, view in [(source.model, view) for source in self._sources for view in source.views()]:
            of = (view.address, view.role, model)
            ready.add_metric(of, view.ready)
            draining.add_metric(of, view.draining)
            ejected.add_metric(of, view.ejected)
            refused.add_metric(of, view.refused)
            running.add_metric(of, view.running)
            waiting.add_metric(of, view.waiting)
            handoffs.add_metric(of, view.open_handoffs)
            blocks.add_metric((*of, "free"), view.blocks_free)
            blocks.add_metric((*of, "cached"), view.blocks_cached)
            blocks.add_metric((*of, "held"), view.blocks_held)
        ejections = CounterMetricFamily(
            "baton_worker_ejections",
            "Times that a worker was ejected, by reason: failures or latency.",
            labels=("reason",),
        )
        for reason in ("failures", "latency"):
            total = sum(source.ejections().get(reason, 0) for source in self._sources)
            ejections.add_metric((reason,), total)
        yield ejections
        yield self._unlinked()
        yield from (ready, draining, ejected, refused, running, waiting, handoffs, blocks)

    def _unlinked(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_unlinked_pairs",
            "Pairs of a prefill and a decode worker that get no requests together, as decode refuses the "
            "link for as long as both run, by the field in which they differ.",
            labels=("model", "field"),
        )
        for source in self._sources:
            for field, count in source.unlinked().items():
                family.add_metric((source.model, field), count)
        return family
