"""``baton bench sweep``: tries candidates in rounds until the time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from baton.bench.sweep.candidate import RingCandidate
from baton.bench.sweep.halving import rounds_for
from baton.bench.sweep.plan import SweepPlan
from baton.bench.sweep.score import Score, Trial
from baton.bench.sweep.trial import TrialRunner
from baton.process.options import StartError, UserError

_STOP_SECONDS = 3.0
"""The end of a trial that is kept for stopping its ring, if the trial is long enough."""


class RingStarter(Protocol):
    """A starter of rings, one at a time."""

    def running(self, candidate: RingCandidate) -> AbstractAsyncContextManager[str]:
        """Start a ring with these settings and yield its address, ready for requests; it is stopped at the
        end. Raises StartError when it cannot start."""


@dataclass(slots=True)
class Sweep:
    """One run of the auto-tuner."""

    plan: SweepPlan
    starter: RingStarter
    runner: TrialRunner
    say: Callable[[str], None]
    _trials: dict[RingCandidate, list[Trial]] = field(default_factory=dict)

    async def run(self) -> list[Score]:
        """Return the scores of all candidates tried, best first. Raises UserError when the defaults cannot be
        measured, for then the settings are not to blame."""
        default = self.plan.default
        entrants = self.plan.chosen()
        rounds = rounds_for(len(entrants))
        began = time.monotonic()
        for number, one in enumerate(rounds):
            entrants = self._best(entrants)[: one.candidates]
            end = began + self.plan.seconds * (number + 1) / len(rounds)
            self.say(_headline(number, len(rounds), entrants))
            order = in_turns([default, *entrants], one.repeats)
            for place, candidate in enumerate(order):
                seconds = (end - time.monotonic()) / (len(order) - place)
                if seconds < self.plan.min_slot / 2:
                    self.say(f"  no time is left for the last {len(order) - place} trials")
                    break
                await self._try(number, candidate, seconds)
        return sorted(self._scores(), key=lambda score: score.rank, reverse=True)

    def _best(self, entrants: Sequence[RingCandidate]) -> list[RingCandidate]:
        """Sort by the last round, best first; candidates whose last trial failed are left out."""
        if not self._trials:
            return list(entrants)
        last = {one: self._trials[one][-1] for one in entrants if one in self._trials}
        well = [one for one, trial in last.items() if trial.failure is None]
        return sorted(well, key=lambda one: last[one].rank, reverse=True)

    async def _try(self, number: int, candidate: RingCandidate, seconds: float) -> None:
        known = self._known_rate(candidate)
        until = time.monotonic() + seconds - min(_STOP_SECONDS, 0.2 * seconds)
        trial = await self._trial(number, candidate, until, known)
        self._trials.setdefault(candidate, []).append(trial)
        name = "defaults" if candidate == self.plan.default else str(candidate)
        self.say(f"  {name}: {trial.failure or f'{trial.goodput:.2f} requests/s'}")
        # One failure of several trials does not throw away what was measured.
        if candidate == self.plan.default and all(one.failure for one in self._trials[candidate]):
            raise UserError(f"the defaults cannot be measured: {trial.failure}")

    async def _trial(self, number: int, candidate: RingCandidate, until: float, known: float | None) -> Trial:
        left = until - time.monotonic()
        try:
            # Stopping the ring is outside of both limits: it must not be cut short.
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(left):
                    url = await stack.enter_async_context(self.starter.running(candidate))
                # The runner keeps to the time by itself; the limit is for a ring that no longer answers.
                async with asyncio.timeout(left + _STOP_SECONDS):
                    probes = await self.runner.run(url, until, candidate.max_num_seqs, known)
        except TimeoutError:
            return Trial(number, (), f"the ring did not start, or did not answer, within {left:.0f} s")
        except (StartError, UserError) as error:
            return Trial(number, (), str(error))
        if not probes:  # not a goodput of 0
            return Trial(number, (), f"the ring started too late to be measured within {left:.0f} s")
        return Trial(number, tuple(probes))

    def _known_rate(self, candidate: RingCandidate) -> float | None:
        """Return the best rate of the earlier trials, or None."""
        trials = self._trials.get(candidate, ())
        rates = [probe.rate for trial in trials for probe in trial.probes if probe.met]
        return max(rates, default=None)

    def _scores(self) -> list[Score]:
        default = self.plan.default
        return [Score(one, one == default, tuple(trials)) for one, trials in self._trials.items()]


def _headline(number: int, rounds: int, entrants: Sequence[RingCandidate]) -> str:
    who = f"{len(entrants)} candidates" if number + 1 < rounds else ", ".join(map(str, entrants)) + ", anew,"
    return f"round {number + 1} of {rounds}: {who} and the defaults"


def in_turns(candidates: Sequence[RingCandidate], repeats: int) -> list[RingCandidate]:
    """Alternate between forward and backward order, so that a machine that gets busier, or less busy, favours
    no candidate."""
    turns = [list(candidates), list(reversed(candidates))]
    return [one for turn in range(repeats) for one in turns[turn % 2]]
