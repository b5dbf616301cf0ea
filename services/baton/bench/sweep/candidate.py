"""The settings that a sweep chooses between."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.process.options import ConfigError

_SPLIT = re.compile(r"(?:([1-9]\d?)p([1-9]\d?)d)?(?:([1-9]\d?)b)?")


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """The number of workers of each role. Written ``2p1d`` (prefill, decode) and ``2b`` (both)."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.both

    def __str__(self) -> str:
        apart = f"{self.prefill}p{self.decode}d" if self.prefill else ""
        return apart + (f"{self.both}b" if self.both else "")


def parse_split(option: str, text: str) -> RoleSplit:
    """Parse a split. Raises ConfigError that names ``option``."""
    match = _SPLIT.fullmatch(text)
    if not text or match is None:
        raise ConfigError(option, f"{text!r} is no split; write it like 1p1d, 2p1d or 2b")
    return RoleSplit(*(int(count or 0) for count in match.groups()))


@dataclass(frozen=True, slots=True)
class RingCandidate:
    """The settings of a ring that could be started."""

    split: RoleSplit
    threads: int
    """CPU threads of each worker."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int

    def __str__(self) -> str:
        return f"{self.split} s{self.max_num_seqs} t{self.max_num_batched_tokens} c{self.prefill_chunk}"

    def options(self) -> list[str]:
        """Return the options for ``baton up``."""
        split = self.split
        roles = [("--prefill", split.prefill), ("--decode", split.decode), ("--both", split.both)]
        rest = [
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--prefill-chunk", self.prefill_chunk),
            ("--threads-per-worker", self.threads),
        ]
        pairs = [pair for pair in roles if pair[1]] + rest
        return [part for option, value in pairs for part in (option, str(value))]


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that are combined to candidates."""

    splits: Sequence[RoleSplit]
    max_num_seqs: Sequence[int]
    max_num_batched_tokens: Sequence[int]
    prefill_chunk: Sequence[int]

    def candidates(self, cores: int) -> list[RingCandidate]:
        """Return all combinations that make sense: a step holds at least one token of each request, and a
        prefill chunk fits into a step. The cores are split evenly among the workers."""
        combined = itertools.product(
            self.splits, self.max_num_seqs, self.max_num_batched_tokens, self.prefill_chunk
        )
        return [
            RingCandidate(split, max(1, cores // split.workers), seqs, budget, chunk)
            for split, seqs, budget, chunk in combined
            if seqs <= budget and chunk <= budget
        ]


def default_splits(places: int) -> list[RoleSplit]:
    """Return every split that uses all of ``places`` (cores, or devices), at most 8, and the smallest
    ones."""
    most = max(1, min(places, 8))
    apart = [RoleSplit(prefill, most - prefill) for prefill in range(1, most)]
    return list(dict.fromkeys([RoleSplit(1, 1), *apart, RoleSplit(both=1), RoleSplit(both=most)]))


def sample(candidates: Iterable[RingCandidate], count: int, seed: int) -> list[RingCandidate]:
    """Return ``count`` of the candidates drawn evenly, or all of them if there are no more."""
    every = list(candidates)
    return every if len(every) <= count else random.Random(f"sweep-{seed}").sample(every, count)
