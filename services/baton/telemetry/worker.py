"""What a worker exports to Prometheus: read from the engine at each scrape, so that a step pays nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.telemetry.exposition import MetricsPort
from baton.telemetry.handoff import Holds
from baton.telemetry.roles import CountedByRole


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """Where evicted KV blocks are kept; blocks and bytes that moved are since the start. All zero where there
    is no such place."""

    blocks_used: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    swapped_in: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What became of drafts; all zero where nobody drafts."""

    verifications: int = 0
    """One for each sequence with drafts in each step."""
    drafted_tokens: int = 0
    """That were verified."""
    accepted_tokens: int = 0
    """Of these; each verification yields one token more."""
    drafting_seconds: float = 0.0

    def plus(self, more: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.verifications + more.verifications,
            self.drafted_tokens + more.drafted_tokens,
            self.accepted_tokens + more.accepted_tokens,
            self.drafting_seconds + more.drafting_seconds,
        )

    def minus(self, before: SpeculationStats) -> SpeculationStats:
        """What was added since ``before``."""
        return SpeculationStats(
            self.verifications - before.verifications,
            self.drafted_tokens - before.drafted_tokens,
            self.accepted_tokens - before.accepted_tokens,
            self.drafting_seconds - before.drafting_seconds,
        )


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What an engine has computed since its start."""

    steps: int = 0
    seconds: float = 0.0
    """In forward passes."""
    sequences: int = 0
    """One for each sequence in each step."""
    prompt_tokens: int = 0
    """In chunks of more than one."""

    def plus(self, seconds: float, sequences: int, prompt_tokens: int) -> WorkDone:
        """After one more step."""
        return WorkDone(
            self.steps + 1,
            self.seconds + seconds,
            self.sequences + sequences,
            self.prompt_tokens + prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker at one moment. Counts without another word are since the process started."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    prefill_tokens_per_s: float
    """Measured, smoothed; 0.0 before the first prompt."""
    step_base_s: float
    """A step that decodes n sequences takes ``step_base_s + n * step_row_s``; 0.0 before the first."""
    step_row_s: float
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_reserved: int
    open_handoffs: int
    preemptions: int
    deadlines_exceeded: int
    copied_blocks: int
    generated_tokens: int
    work: WorkDone
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    handoffs_completed: int
    """Sent whole by prefill, or committed by decode."""
    handoffs_aborted: Mapping[str, int]
    """By reason."""
    handoff_stale_messages: int
    handoff_fences: int
    handoff_holds: Sequence[Holds]
    """What sends and receives pin now."""
    host_tier: HostTierStats
    speculation: SpeculationStats


class WorkerCollector(Collector):
    """The worker's metrics, all with a ``role`` label."""

    def __init__(self, counted: CountedByRole, stats: Callable[[], WorkerStats]) -> None:
        self._counted = counted
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauge, counter = self._gauge, self._counter
        yield gauge("baton_sequences_running", "Sequences in the running batch.", stats.running)
        yield gauge("baton_sequences_waiting", "Sequences that wait for a place in it.", stats.waiting)
        yield gauge(
            "baton_waiting_prefill_tokens",
            "Prompt tokens accepted and not computed yet.",
            stats.waiting_prefill_tokens,
        )
        rate = stats.prefill_tokens_per_s
        yield gauge("baton_prefill_tokens_per_second", "How fast prompts are computed here, lately.", rate)
        yield gauge(
            "baton_prefill_backlog_seconds",
            "What computing the waiting prompt tokens will take, at that pace; 0 before the first prompt.",
            stats.waiting_prefill_tokens / rate if rate else 0.0,
        )
        yield gauge(
            "baton_decode_step_base_seconds",
            "What a step that only decodes takes, lately, but for its sequences; 0 before the first.",
            stats.step_base_s,
        )
        yield gauge("baton_decode_step_row_seconds", "What each sequence adds to it.", stats.step_row_s)
        yield from self._blocks(stats)
        yield from self._work(stats.work)
        yield gauge("baton_handoffs_open", "Handoffs that have begun and not ended.", stats.open_handoffs)
        yield counter("baton_preemptions", "Sequences that lost their blocks to others.", stats.preemptions)
        yield counter(
            "baton_deadlines_exceeded",
            "Requests ended here because their deadline had passed.",
            stats.deadlines_exceeded,
        )
        yield counter(
            "baton_kv_blocks_copied",
            "Blocks copied for one of several answers, or beams, to write to.",
            stats.copied_blocks,
        )
        yield counter("baton_engine_generated_tokens", "Tokens sampled here.", stats.generated_tokens)
        yield counter(
            "baton_prefix_queried_tokens",
            "Tokens looked up in the prefix cache.",
            stats.prefix_queried_tokens,
        )
        yield counter("baton_prefix_hit_tokens", "Tokens found in it.", stats.prefix_hit_tokens)
        yield from self._host_tier(stats.host_tier)
        yield from self._speculation(stats.speculation)
        yield counter("baton_handoffs_completed", "Handoffs that went through.", stats.handoffs_completed)
        yield self._aborts(stats)
        yield counter(
            "baton_handoff_stale_messages",
            "Messages dropped for an unknown name, an older attempt or an older epoch.",
            stats.handoff_stale_messages,
        )
        yield counter("baton_handoff_fences", "Links forced closed.", stats.handoff_fences)
        held = sum(holds.blocks for holds in stats.handoff_holds)
        yield gauge("baton_handoff_held_blocks", "KV blocks that a transfer reads or writes.", held)
        began = [holds.since for holds in stats.handoff_holds if holds.since is not None]
        age = time.monotonic() - min(began) if began else 0.0
        yield gauge("baton_handoff_oldest_hold_seconds", "Age of the oldest transfer under way.", age)

    def _work(self, work: WorkDone) -> Iterator[Metric]:
        counter = self._counter
        yield counter("baton_engine_steps", "Steps computed.", work.steps)
        yield counter(
            "baton_engine_busy_seconds",
            "Time in forward passes: its rate is the share of time in which the engine computes.",
            work.seconds,
        )
        yield counter(
            "baton_engine_step_sequences",
            "One for each sequence in each step: over the steps, the mean batch.",
            work.sequences,
        )
        yield counter("baton_engine_prompt_tokens", "Prompt tokens computed.", work.prompt_tokens)

    def _blocks(self, stats: WorkerStats) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_kv_blocks",
            "KV blocks: free, cached (evictable, findable by prefix), held (by a sequence or a transfer).",
            labels=("role", "state"),
        )
        family.add_metric((self._counted.role, "free"), stats.blocks_free)
        family.add_metric((self._counted.role, "cached"), stats.blocks_cached)
        family.add_metric((self._counted.role, "held"), stats.blocks_held)
        yield family
        yield self._gauge(
            "baton_kv_reserved_blocks",
            "Blocks promised to handoffs and not bound yet; they are among the free and the cached.",
            stats.blocks_reserved,
        )
        blocks = stats.blocks_free + stats.blocks_cached + stats.blocks_held
        yield self._gauge(
            "baton_kv_usage_ratio",
            "Share of KV blocks that are held, 0 to 1.",
            stats.blocks_held / blocks if blocks else 0.0,
        )

    def _host_tier(self, tier: HostTierStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        yield gauge("baton_host_kv_blocks_used", "KV blocks in host memory.", tier.blocks_used)
        yield gauge("baton_host_kv_blocks_capacity", "KV blocks that host memory has room for.", tier.blocks)
        yield counter("baton_host_kv_hit_blocks", "KV blocks that came back by copy.", tier.hit_blocks)
        yield counter("baton_host_kv_saved_blocks", "KV blocks evicted into it.", tier.saved_blocks)
        yield counter("baton_host_kv_evicted_blocks", "KV blocks evicted from it.", tier.evicted_blocks)
        yield counter(
            "baton_host_kv_dropped_blocks",
            "KV blocks evicted and not saved, as all of it was about to be read.",
            tier.dropped_blocks,
        )
        yield counter("baton_host_kv_saved_bytes", "Bytes copied to host memory.", tier.saved_bytes)
        yield counter("baton_host_kv_restored_bytes", "Bytes copied back.", tier.restored_bytes)
        yield counter(
            "baton_sequences_swapped_in", "Preempted sequences that came back by copy.", tier.swapped_in
        )

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        counter = self._counter
        yield counter(
            "baton_speculation_verifications", "Steps of sequences with drafts.", stats.verifications
        )
        yield counter("baton_speculation_drafted_tokens", "Drafts verified.", stats.drafted_tokens)
        yield counter("baton_speculation_accepted_tokens", "Drafts accepted.", stats.accepted_tokens)
        yield counter(
            "baton_speculation_drafting_seconds", "Time that making drafts took.", stats.drafting_seconds
        )

    def _aborts(self, stats: WorkerStats) -> Metric:
        family = CounterMetricFamily(
            "baton_handoffs_aborted", "Handoffs given up, by reason.", labels=("role", "reason")
        )
        for reason, total in stats.handoffs_aborted.items():
            for role, count in self._counted.split((family.name, reason), total).items():
                family.add_metric((role, reason), count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("role",))
        family.add_metric((self._counted.role,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("role",))
        for role, count in self._counted.split((name,), value).items():
            family.add_metric((role,), count)
        return family


async def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, stack: contextlib.AsyncExitStack
) -> int | None:
    """Serve ``/metrics`` over HTTP until ``stack`` unwinds. Returns the port, None for port -1.

    Raises OSError when the port cannot be had.
    """
    if port < 0:
        return None
    serving = MetricsPort(registry)
    stack.push_async_callback(serving.close)
    return await serving.open(host, port)
