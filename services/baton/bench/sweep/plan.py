"""The candidates and the time of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.sweep.candidate import RingCandidate, sample
from baton.bench.sweep.halving import max_candidates, rounds_for
from baton.process.options import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The candidates and the time of a sweep."""

    default: RingCandidate
    candidates: Sequence[RingCandidate]
    """The candidates without the default."""
    seconds: float
    min_slot: float = 30.0
    """The shortest useful trial, in seconds."""
    seed: int = 0

    def chosen(self) -> list[RingCandidate]:
        """Return the candidates that there is time for. Raises ConfigError when the time is not enough for
        one."""
        count = max_candidates(len(self.candidates), self.seconds, self.min_slot)
        if count == 0:
            least = rounds_for(1)[0].slots * self.min_slot / 60
            raise ConfigError("minutes", f"must be at least {least:.1f}, not {self.seconds / 60:g}")
        return sample(self.candidates, count, self.seed)
