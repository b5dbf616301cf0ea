"""What a sweep searches through: its options, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.bench.sweep.candidate import Candidate, Grid, default_splits, parse_split
from baton.bench.sweep.plan import SweepPlan
from baton.options import ConfigError, check_range

_MOST_VALUES = 16
_MOST_CORES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Raises ConfigError for a value that cannot work. Lists are written with commas."""

    minutes: float = 30.0
    attainment: float = 0.9
    """The share of requests that must meet the goals."""
    splits: str | None = None
    max_num_seqs: str = "16,64,256"
    max_num_batched_tokens: str = "256,512,2048"
    prefill_chunk: str = "128,256,512"
    cores: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise ConfigError("minutes", f"must be above 0, not {self.minutes:g}")
        if not 0 < self.attainment <= 1:
            raise ConfigError("attainment", f"must be above 0, at most 1, not {self.attainment:g}")
        if self.cores is not None:
            check_range("cores", self.cores, 1, _MOST_CORES)
        self.grid(1)

    def grid(self, places: int) -> Grid:
        """The values to combine, where there are so many places (cores, or devices) for workers."""
        texts = self.splits.split(",") if self.splits is not None else []
        splits = [parse_split("splits", text.strip()) for text in texts] or default_splits(places)
        numbers = (
            _numbers(name, getattr(self, name))
            for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk")
        )
        return Grid(splits, *numbers)

    def plan(self, default: Candidate, cores: int, places: int) -> SweepPlan:
        """What to try besides ``default``. Raises ConfigError when nothing is left."""
        cores = self.cores or cores
        candidates = [one for one in self.grid(places).candidates(cores) if one != default]
        if not candidates:
            problem = "no combination is left: a step must hold a token of each request and a whole chunk"
            raise ConfigError("max_num_batched_tokens", problem)
        return SweepPlan(default=default, candidates=candidates, seconds=60 * self.minutes, seed=self.seed)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    written = all(part.isascii() and part.isdigit() and int(part) for part in parts)
    if not written or len(parts) > _MOST_VALUES:
        raise ConfigError(
            option, f"{text!r} is no list; write whole numbers above 0 with commas, at most {_MOST_VALUES}"
        )
    return list(dict.fromkeys(map(int, parts)))
