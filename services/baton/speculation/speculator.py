"""Which sequences get drafts, how many, and what became of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from baton.speculation.drafter import Drafter, TokenSequence
from baton.telemetry.worker import SpeculationStats

PATIENCE = 3
"""Verifications in a row that accept nothing before a sequence pauses."""
LONGEST_PAUSE = 32
"""Steps."""

_Sequence = TypeVar("_Sequence", bound=TokenSequence)


@dataclass(slots=True)
class _Record:
    """What drafts have been worth to one sequence lately."""

    refusals: int = 0
    """Verifications in a row that accepted nothing."""
    pause: int = 0
    """Steps to go without drafts."""


class Speculator:
    """A drafter with its manners: drafts are cut to what can be verified, and a sequence whose drafts are
    useless is left in peace. After ``PATIENCE`` verifications in a row without an accepted token it pauses
    for 1 step, then for 2, 4, and up to ``LONGEST_PAUSE``, until one is accepted.

    For the engine's thread, but for :meth:`ended`.
    """

    def __init__(self, drafter: Drafter, num_tokens: int, vocab_size: int) -> None:
        """``num_tokens``: most drafts per step and sequence."""
        self.drafter = drafter
        self.num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._records: dict[TokenSequence, _Record] = {}
        self._ended: deque[TokenSequence] = deque()
        self.stats = SpeculationStats()
        """Replaced, never changed: any thread may read it."""

    def ended(self, sequence: TokenSequence) -> None:
        """A sequence is over. Any thread."""
        self._ended.append(sequence)

    def forget_ended(self) -> None:
        """Forgets those that have ended. To be called before the sequences to draft for are looked up: who
        ends after that is forgotten next time, when nothing more is done for him."""
        while self._ended:
            sequence = self._ended.popleft()
            self._records.pop(sequence, None)
            self.drafter.forget(sequence)

    def draft(self, sequences: Iterable[_Sequence]) -> dict[_Sequence, list[int]]:
        """The drafts of those for whom there are any. None reaches a sequence's greatest length: the token
        behind the last accepted one must have room too."""
        wanted: list[_Sequence] = []
        limits: list[int] = []
        for seq in sequences:
            limit = min(self.num_tokens, seq.max_len - seq.num_tokens - 1)
            if limit > 0 and not self._pauses(seq):
                wanted.append(seq)
                limits.append(limit)
        if not wanted:
            return {}
        began = time.perf_counter()
        drafts = self.drafter.draft(wanted, limits)
        seconds = time.perf_counter() - began
        self.stats = self.stats.plus(SpeculationStats(drafting_seconds=seconds))
        valid = {
            seq: self._valid(tokens[:limit])
            for seq, tokens, limit in zip(wanted, drafts, limits, strict=True)
        }
        return {seq: tokens for seq, tokens in valid.items() if tokens}

    def verified(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """A step has told how many of a sequence's drafts were right."""
        self.stats = self.stats.plus(
            SpeculationStats(verifications=1, drafted_tokens=drafted, accepted_tokens=accepted)
        )
        record = self._records.setdefault(sequence, _Record())
        record.refusals = 0 if accepted else record.refusals + 1
        if record.refusals >= PATIENCE:
            record.pause = min(2 ** (record.refusals - PATIENCE), LONGEST_PAUSE)

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        """As ``Drafter.observe``."""
        self.drafter.observe(sequence, first, hidden)

    def _pauses(self, sequence: TokenSequence) -> bool:
        record = self._records.get(sequence)
        if record is None or record.pause == 0:
            return False
        record.pause -= 1
        return True

    def _valid(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that is none: one bad id would fail the whole step."""
        valid: list[int] = []
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                break
            valid.append(token)
        return valid
