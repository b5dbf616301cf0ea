"""The division of a sweep's time: successive halving.

All candidates are tried for a short time; the better third goes on to the next round, which takes as long in
all, so that each candidate gets about three times as much; and so on, until one is left. That winner was
chosen by figures that chance had a part in, so those figures do not count: the last round measures the winner
and the defaults anew, several times in turns. The defaults are in every round and are never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KEEP = 3
"""The divisor of candidates from round to round: one of ``KEEP`` goes on."""
REPEATS = 5
"""Trials of the winner and of the defaults in the last round. Without a difference, all five of one lie above
all five of the other once in 252 times."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: ``candidates`` besides the defaults, each tried ``repeats`` times."""

    candidates: int
    repeats: int

    @property
    def slots(self) -> int:
        """The rings that the round starts, those with the defaults included."""
        return (self.candidates + 1) * self.repeats


def rounds_for(candidates: int) -> list[Round]:
    """Return the rounds for ``candidates`` besides the defaults."""
    rounds = []
    while candidates > 1:
        rounds.append(Round(candidates, 1))
        candidates = math.ceil(candidates / KEEP)
    return [*rounds, Round(candidates, REPEATS)]


def max_candidates(available: int, seconds: float, min_slot: float) -> int:
    """Return how many of the candidates can be tried in the time, with no slot under ``min_slot`` seconds;
    rounds share the time evenly. 0 when it is not enough to try one."""
    for count in range(available, 0, -1):
        rounds = rounds_for(count)
        if seconds / len(rounds) >= min_slot * max(one.slots for one in rounds):
            return count
    return 0
