"""What a sweep tries, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.sweep.candidate import Candidate, sample
from baton.bench.sweep.halving import most_candidates, rounds_for
from baton.options import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What to try, and for how long."""

    default: Candidate
    candidates: Sequence[Candidate]
    """Without the default."""
    seconds: float
    least_slot: float = 30.0
    """A trial shorter than this, seconds, would tell nothing."""
    seed: int = 0

    def chosen(self) -> list[Candidate]:
        """Those that there is time for. Raises ConfigError when it is not enough for one."""
        count = most_candidates(len(self.candidates), self.seconds, self.least_slot)
        if count == 0:
            least = rounds_for(1)[0].slots * self.least_slot / 60
            raise ConfigError("minutes", f"must be at least {least:.1f}, not {self.seconds / 60:g}")
        return sample(self.candidates, count, self.seed)
