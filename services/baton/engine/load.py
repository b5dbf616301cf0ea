"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from baton.telemetry.worker import HostTierStats, SpeculationStats, WorkDone


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, and what it has done since it started."""

    running: int
    waiting: int
    """In the queue, arrived by handoff and without a seat, or without its grammar."""
    held: int
    """Prefilled, for a handoff."""
    waiting_prefill_tokens: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_reserved: int
    preemptions: int
    copied_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    work: WorkDone
    prefill_tokens_per_s: float
    """This and the two below: ``baton.engine.pace``."""
    step_base_s: float
    step_row_s: float
    host_tier: HostTierStats
    speculation: SpeculationStats
