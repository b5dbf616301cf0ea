"""What a sweep searches through: its options, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from baton.bench.sweep.candidate import Grid, RingCandidate, default_splits, parse_split
from baton.bench.sweep.plan import SweepPlan
from baton.bench.workload.config import Seed
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError

_SEARCH = "Search"
_MAX_VALUES = 16
_MAX_CORES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Raises ConfigError for a value that cannot work. Lists are written with commas."""

    minutes: Annotated[float, Option("When the search has to be over.", _SEARCH)] = 30.0
    attainment: Annotated[float, Option("Share of the requests that must meet the goals.", _SEARCH)] = 0.9
    splits: Annotated[
        str | None,
        Option(
            "Workers by role, as 1p1d,2p1d,2b. Default: those that use all cores or devices, and the "
            "smallest.",
            _SEARCH,
            metavar="LIST",
        ),
    ] = None
    max_num_seqs: Annotated[str, Option("Values to try.", _SEARCH, metavar="LIST")] = "16,64,256"
    max_num_batched_tokens: Annotated[str, Option("Values to try.", _SEARCH, metavar="LIST")] = "256,512,2048"
    prefill_chunk: Annotated[str, Option("Values to try.", _SEARCH, metavar="LIST")] = "128,256,512"
    cores: Annotated[
        int | None,
        Option("CPU cores to share out to workers. Default: all.", _SEARCH, least=1, most=_MAX_CORES),
    ] = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.minutes < math.inf:
            raise ConfigError("minutes", f"must be above 0, not {self.minutes:g}")
        if not 0 < self.attainment <= 1:
            raise ConfigError("attainment", f"must be above 0, at most 1, not {self.attainment:g}")
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

    def plan(self, default: RingCandidate, cores: int, places: int) -> SweepPlan:
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
    if not written or len(parts) > _MAX_VALUES:
        raise ConfigError(
            option, f"{text!r} is no list; write whole numbers above 0 with commas, at most {_MAX_VALUES}"
        )
    return list(dict.fromkeys(map(int, parts)))
