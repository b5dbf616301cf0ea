"""The policy of speculation: which sequences get drafts, how many, and how many were accepted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from baton.speculation.drafter import Drafter, TokenSequence
from baton.speculation.stats import NO_DRAFTS, SpeculationStats

PATIENCE = 3
"""Verifications in a row that accept nothing before a sequence pauses."""
MAX_PAUSE = 32
"""The longest pause of a sequence, in steps."""

_Sequence = TypeVar("_Sequence", bound=TokenSequence)


@dataclass(slots=True)
class _Record:
    """The recent worth of drafts to one sequence."""

    refusals: int = 0
    """Verifications in a row that accepted nothing."""
    pause: int = 0
    """Steps to go without drafts."""


class Speculator:
    """A drafter and its limits: drafts are shortened to what can be verified, and a sequence whose drafts are
    useless pauses. After ``PATIENCE`` verifications in a row without an accepted token it pauses for 1 step,
    then for 2, 4, and up to ``MAX_PAUSE``, until one is accepted.

    For the engine's thread, but for :meth:`ended`.
    """

    def __init__(self, drafter: Drafter, num_tokens: int, vocab_size: int) -> None:
        """``num_tokens``: most drafts per step and sequence."""
        self.drafter = drafter
        self.num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._records: dict[TokenSequence, _Record] = {}
        self._ended: deque[TokenSequence] = deque()
        self.stats = NO_DRAFTS
        """The figures so far. Replaced, never changed: any thread may read them."""

    def anew(self) -> Speculator:
        """Return a speculator of this drafter and these limits that has seen and counted nothing."""
        return Speculator(self.drafter, self.num_tokens, self._vocab_size)

    def ended(self, sequence: TokenSequence) -> None:
        """Notes that a sequence is over. Any thread."""
        self._ended.append(sequence)

    def forget_ended(self) -> None:
        """Forgets the sequences that have ended. To be called before the sequences to draft for are looked
        up: a sequence that ends after that is forgotten by the next call, when nothing more is done for
        it."""
        while self._ended:
            sequence = self._ended.popleft()
            self._records.pop(sequence, None)
            self.drafter.forget(sequence)

    def draft(self, sequences: Iterable[_Sequence]) -> dict[_Sequence, list[int]]:
        """The drafts of each sequence that gets any. No draft reaches a sequence's greatest length: the token
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
        """Records how many of a sequence's drafts a step accepted."""
        self.stats = self.stats.plus(
            SpeculationStats(verifications=1, drafted_tokens=drafted, accepted_tokens=accepted)
        )
        record = self._records.setdefault(sequence, _Record())
        record.refusals = 0 if accepted else record.refusals + 1
        if record.refusals >= PATIENCE:
            record.pause = min(2 ** (record.refusals - PATIENCE), MAX_PAUSE)

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        """Passes the hidden states on to ``Drafter.observe``."""
        self.drafter.observe(sequence, first, hidden)

    def _pauses(self, sequence: TokenSequence) -> bool:
        record = self._records.get(sequence)
        if record is None or record.pause == 0:
            return False
        record.pause -= 1
        return True

    def _valid(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first invalid one: one bad id would fail the whole step."""
        valid: list[int] = []
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                break
            valid.append(token)
        return valid
