"""An engine's figures: how busy it is, and what it has done since it started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.engine.kv.block_pool import PoolStats
from baton.engine.kv.host_tier import HostTierStats
from baton.engine.pace import PaceStats
from baton.engine.scheduler import SchedulerCounters
from baton.process.exported import counter, gauge
from baton.speculation.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What an engine has computed since its start."""

    steps: Annotated[int, counter("baton_engine_steps", "Steps computed.")] = 0
    seconds: Annotated[
        float,
        counter(
            "baton_engine_busy_seconds",
            "Time in forward passes: its rate is the share of time in which the engine computes.",
        ),
    ] = 0.0
    sequences: Annotated[
        int,
        counter(
            "baton_engine_step_sequences",
            "One for each sequence in each step: over the steps, the mean batch.",
        ),
    ] = 0
    prompt_tokens: Annotated[int, counter("baton_engine_prompt_tokens", "Prompt tokens computed.")] = 0
    """Tokens of chunks of more than one token."""

    def plus(self, seconds: float, sequences: int, prompt_tokens: int) -> WorkDone:
        """The work after one more step."""
        return WorkDone(
            self.steps + 1,
            self.seconds + seconds,
            self.sequences + sequences,
            self.prompt_tokens + prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment: all figures are read under one hold of its lock, and nothing changes them
    later. Counts are since the engine was made."""

    running: Annotated[int, gauge("baton_sequences_running", "Sequences in the running batch.")]
    waiting: Annotated[int, gauge("baton_sequences_waiting", "Sequences that wait for a place in it.")]
    """Sequences in the queue, sequences that arrived by handoff and have no seat, and sequences without their
    grammar."""
    held: int
    """Prefilled sequences that keep their blocks for a handoff."""
    waiting_prefill_tokens: int
    """Prompt tokens of accepted sequences that are not computed yet."""
    blocks: PoolStats
    blocks_reserved: Annotated[
        int,
        gauge(
            "baton_kv_reserved_blocks",
            "Blocks promised to handoffs and not bound yet; they are among the free and the cached.",
        ),
    ]
    pace: PaceStats
    work: WorkDone
    scheduler: SchedulerCounters
    """A copy of the scheduler's counters, which count on."""
    generated_tokens: Annotated[int, counter("baton_engine_generated_tokens", "Tokens sampled here.")]
    host_tier: HostTierStats
    speculation: SpeculationStats
    late_builds: Annotated[
        int,
        counter(
            "baton_kernels_compiled_late",
            "Kernels compiled since the device was ready: each stops all requests.",
        ),
    ]
