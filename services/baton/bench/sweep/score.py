"""The results of one candidate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.sweep.candidate import RingCandidate


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one rate, offered for a while. Times are in seconds."""

    rate: float
    """The offered rate in requests/s."""
    requests: int
    attainment: float
    """The share of the requests that met all goals; one that had not ended in time did not."""
    met: bool
    """Whether the attainment is high enough."""
    ttft: float | None
    """The 90th percentile of whole answers' TTFTs."""
    itl: float | None
    """The 90th percentile of whole answers' ITLs."""
    output_tokens_per_s: float

    @property
    def goodput(self) -> float:
        """Requests/s that met all goals."""
        return self.rate * self.attainment


@dataclass(frozen=True, slots=True)
class Trial:
    """One ring with the candidate's settings, from its start to its end."""

    round: int
    probes: tuple[Probe, ...]
    failure: str | None = None

    @property
    def goodput(self) -> float:
        """The highest goodput at which enough requests met the goals; 0 if there is none."""
        return max((probe.goodput for probe in self.probes if probe.met), default=0.0)

    @property
    def rank(self) -> tuple[float, float]:
        """The key to compare trials by. Trials that never met the goals compare by how near they came."""
        nearest = max((probe.attainment for probe in self.probes), default=-1.0)
        return self.goodput, nearest


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate with all its trials."""

    candidate: RingCandidate
    is_default: bool
    trials: tuple[Trial, ...]

    @property
    def last_round(self) -> int:
        return max(trial.round for trial in self.trials)

    @property
    def goodput(self) -> float:
        """The median goodput of the candidate's last round, which had the most time."""
        return statistics.median(trial.goodput for trial in self._last())

    @property
    def goodput_range(self) -> tuple[float, float]:
        """The lowest and the highest goodput of the candidate's last round."""
        found = [trial.goodput for trial in self._last()]
        return min(found), max(found)

    @property
    def rank(self) -> tuple[int, float, float]:
        """The key to compare candidates by: a candidate that reached a later round is better."""
        goodputs, nearest = zip(*(trial.rank for trial in self._last()), strict=True)
        return self.last_round, statistics.median(goodputs), statistics.median(nearest)

    @property
    def best_probe(self) -> Probe | None:
        """The last round's probe with the highest goodput that met the goals, or the nearest to it."""
        probes = [probe for trial in self._last() for probe in trial.probes]
        return max(probes, key=lambda probe: (probe.met, probe.goodput), default=None)

    @property
    def failure(self) -> str | None:
        """Why nothing was measured in the last round; None if anything was."""
        failures = [trial.failure for trial in self._last()]
        return failures[0] if all(failures) else None

    @property
    def repeats(self) -> int:
        """Trials in the candidate's last round."""
        return len(self._last())

    def _last(self) -> Sequence[Trial]:
        return [trial for trial in self.trials if trial.round == self.last_round]


FEWEST_TRIALS = 3
"""Fewest trials of each side to call one better. Three above three others come by chance once in 20 times."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The winner of a sweep against the defaults, by the trials that they had in turns in its last round."""

    default: Score
    winner: Score | None
    """The best candidate; None if no candidate was measured in that round."""

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Comparison:
        """Compare a sweep's ``scores``, given best first."""
        default = next(score for score in scores if score.is_default)
        others = (score for score in scores if not score.is_default and not score.failure)
        winner = next((score for score in others if score.last_round == default.last_round), None)
        return cls(default, winner)

    @property
    def enough(self) -> bool:
        """Whether both were measured often enough to tell."""
        return self.winner is not None and min(self.winner.repeats, self.default.repeats) >= FEWEST_TRIALS

    @property
    def better(self) -> bool:
        """Whether the winner is better beyond the spread: its worst trial above the defaults' best."""
        if self.winner is None or not self.enough:
            return False
        return self.winner.goodput_range[0] > self.default.goodput_range[1]

    @property
    def chosen(self) -> Score:
        """The settings to use: the defaults unless the winner is better."""
        return self.winner if self.winner is not None and self.better else self.default
