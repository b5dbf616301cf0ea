"""How the time of a sweep is shared out: successive halving.

All candidates are tried for a short time; the better third goes on to the next round, which takes as long
in all, so that each candidate gets about three times as much; and so on, until one is left. It was chosen for
figures that chance had a part in, so they do not count: the last round measures it and the defaults anew,
several times in turns. The defaults are in every round and are never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KEEP = 3
"""One of so many goes on."""
REPEATS = 5
"""Trials of the winner and of the defaults in the last round. That all five of one lie above all five of the
other happens once in 252 times if there is no difference."""


@dataclass(frozen=True, slots=True)
class Round:
    """``candidates`` besides the defaults, each tried ``repeats`` times."""

    candidates: int
    repeats: int

    @property
    def slots(self) -> int:
        """Rings that are started, those with the defaults included."""
        return (self.candidates + 1) * self.repeats


def rounds_for(candidates: int) -> list[Round]:
    """The rounds for so many candidates besides the defaults."""
    rounds = []
    while candidates > 1:
        rounds.append(Round(candidates, 1))
        candidates = math.ceil(candidates / KEEP)
    return [*rounds, Round(candidates, REPEATS)]


def most_candidates(available: int, seconds: float, least_slot: float) -> int:
    """How many of the candidates can be tried in the time, with no slot under ``least_slot`` seconds; rounds
    share the time evenly. 0 when it is not enough to try one."""
    for count in range(available, 0, -1):
        rounds = rounds_for(count)
        if seconds / len(rounds) >= least_slot * max(one.slots for one in rounds):
            return count
    return 0
