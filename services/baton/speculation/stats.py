"""The figures of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.process.exported import counter


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts of drafts and their cost; all zero without a drafter."""

    verifications: Annotated[
        int, counter("baton_speculation_verifications", "Steps of sequences with drafts.")
    ] = 0
    """The count of (sequence, step) pairs with drafts."""
    drafted_tokens: Annotated[int, counter("baton_speculation_drafted_tokens", "Drafts verified.")] = 0
    accepted_tokens: Annotated[int, counter("baton_speculation_accepted_tokens", "Drafts accepted.")] = 0
    """The accepted ones of ``drafted_tokens``; each verification yields one token more."""
    drafting_seconds: Annotated[
        float, counter("baton_speculation_drafting_seconds", "Time that making drafts took.")
    ] = 0.0

    def plus(self, more: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.verifications + more.verifications,
            self.drafted_tokens + more.drafted_tokens,
            self.accepted_tokens + more.accepted_tokens,
            self.drafting_seconds + more.drafting_seconds,
        )

    def minus(self, before: SpeculationStats) -> SpeculationStats:
        """The figures added since ``before``."""
        return SpeculationStats(
            self.verifications - before.verifications,
            self.drafted_tokens - before.drafted_tokens,
            self.accepted_tokens - before.accepted_tokens,
            self.drafting_seconds - before.drafting_seconds,
        )


NO_DRAFTS = SpeculationStats()
"""The stats without a drafter."""
