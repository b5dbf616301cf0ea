"""The planner's policy against two independent autoscalers, over a day of requests.

    python -m loadtest.planner [--seeds 3] [--hours 24] [--starts 120,60,300] [--bursts 24] [--jobs 1]

Every request is simulated; workers take the times of the profile ``8b-l4`` of `baton.simulated.profile`,
which are stated, not measured. The planner is the code that ships, with the figures that Prometheus would
give it. The autoscalers do as Kubernetes' controller does with the metrics that the chart gives it. Their
targets and behaviour are searched for on the first seed; the pairs that no other beats in both figures go on
to all seeds. The planner gets its defaults, and other attainments to aim at, for the comparison with pairs
that attain less. Exit status 1 unless, by its defaults, it attains as much as the best pair for 0.85 of that
pair's hours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean

from rich.console import Console
from rich.table import Table

from baton.planner.goals import LatencyTargets, PlanBounds, Times
from baton.planner.measured import Counts
from baton.planner.policy import Planner
from baton.simulated.profile import PROFILES
from loadtest.conditions import conditions
from loadtest.planner.cluster import Setting
from loadtest.planner.run import Outcome, simulate
from loadtest.planner.scalers import CHART, KUBERNETES, Behavior, HpaSetting, Scaler, Shipped, TwoHpas
from loadtest.planner.trace import BURSTS, Request, day

TTFT_S, ITL_S = 3.0, 0.15
AIMS = (0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)
DEFAULT_AIM = 0.998
ROOM = 42_000
"""Tokens of KV beside 8 billion parameters on 24 GB."""
SWITCH_S, SETTLE_S = 30.0, 180.0
MOST = 24
"""Most workers of one role; the GPU budget is twice as many. No scaler reaches these bounds."""
FIRST = Counts(prefill=4, decode=4)
RATIO = 0.85


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of autoscalers, and their settings."""

    prefill: float
    decode: float
    behavior: Behavior

    @property
    def name(self) -> str:
        how = "chart's pace" if self.behavior == CHART else "Kubernetes' pace"
        return f"{self.prefill:g} s, {self.decode:g}, {how}"

    def make(self, start_s: float) -> Scaler:
        settings = (
            HpaSetting(target=target, least=1, most=MOST, behavior=self.behavior)
            for target in (self.prefill, self.decode)
        )
        return TwoHpas(*settings)


@dataclass(frozen=True, slots=True)
class Ours:
    """The planner, and its settings."""

    attainment: float = DEFAULT_AIM
    switches: bool = True

    @property
    def name(self) -> str:
        return f"planner for {self.attainment:.1%}" + ("" if self.switches else ", no switches")

    def make(self, start_s: float) -> Scaler:
        return Shipped(
            Planner(
                LatencyTargets(ttft_s=TTFT_S, itl_s=ITL_S, attainment=self.attainment),
                PlanBounds(gpu_budget=2 * MOST, max_prefill=MOST, max_decode=MOST),
                Times(start_s=start_s, switch_s=SWITCH_S, settle_s=SETTLE_S),
                switches=self.switches,
            )
        )


DEFAULT = Pair(1.5, 0.8, CHART)
BACKLOGS_S = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25)
KV_USES = (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8)
SEARCHED = (
    DEFAULT,
    *(Pair(*each) for each in product(BACKLOGS_S, KV_USES, (CHART,))),
    *(Pair(*each) for each in product((0.25, 0.35, 0.5, 0.7), (0.4, 0.5, 0.6), (KUBERNETES,))),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One day of one scaler."""

    scaler: Pair | Ours
    seed: int
    hours: float
    bursts: int
    start_s: float

    def simulate(self) -> Outcome:
        trace = _day(self.seed, self.hours, self.bursts)
        return simulate(trace, self.scaler.make(self.start_s), setting(self.start_s), FIRST, self.seed)


@cache
def _day(seed: int, hours: float, bursts: int) -> list[Request]:
    return day(seed, hours=hours, bursts=bursts)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean outcome of one scaler, over seeds."""

    name: str
    outcomes: Sequence[Outcome]

    @property
    def attainment(self) -> float:
        return fmean(each.attainment for each in self.outcomes)

    @property
    def gpu_hours(self) -> float:
        return fmean(each.gpu_hours for each in self.outcomes)

    def cells(self) -> list[str]:
        worst = min(each.attainment for each in self.outcomes)
        of = [fmean(getattr(each, name) for each in self.outcomes) for name in ("ttft_met", "itl_met")]
        counts = [
            fmean(getattr(each, name) for each in self.outcomes) for name in ("scalings", "switches", "moved")
        ]
        return [
            self.name,
            f"{self.attainment:.2%}",
            f"{worst:.2%}",
            *(f"{share:.2%}" for share in of),
            f"{fmean(each.ttft_p99 for each in self.outcomes):.1f}",
            f"{self.gpu_hours:.1f}",
            *(f"{number:.0f}" for number in counts),
        ]


COLUMNS = (
    "scaler",
    "both met",
    "worst seed",
    "TTFT met",
    "ITL met",
    "TTFT p99, s",
    "GPU-hours",
    "scalings",
    "switches",
    "answers moved",
)


def setting(start_s: float) -> Setting:
    return Setting(
        profile=PROFILES["8b-l4"],
        room=ROOM,
        ttft_s=TTFT_S,
        itl_s=ITL_S,
        start_s=start_s,
        drain_s=60.0,
        turn_s=2.0,
    )


def frontier(means: Sequence[Mean]) -> list[Mean]:
    """Return the means that no other beats in both figures, the cheapest first."""
    best: list[Mean] = []
    for each in sorted(means, key=lambda mean: (mean.gpu_hours, -mean.attainment)):
        if not best or each.attainment > best[-1].attainment:
            best.append(each)
    return best


def table(title: str, means: Sequence[Mean], console: Console) -> None:
    shown = Table(*COLUMNS, title=title, title_justify="left")
    for each in means:
        shown.add_row(*each.cells())
    console.print(shown)


class Days:
    """Days that are the same for all scalers, run some at a time."""

    def __init__(self, pool: Executor, seeds: int, hours: float, bursts: int, start_s: float) -> None:
        self._pool, self._seeds = pool, range(1, seeds + 1)
        self._hours, self._bursts, self._start_s = hours, bursts, start_s
        self._done: dict[tuple[Pair | Ours, int], Outcome] = {}

    def over(self, scalers: Sequence[Pair | Ours], seeds: int | None = None) -> list[Mean]:
        """Return the means of the scalers on the first ``seeds`` days, or on all."""
        chosen = self._seeds[:seeds]
        todo = [(each, seed) for each in scalers for seed in chosen if (each, seed) not in self._done]
        runs = [Run(each, seed, self._hours, self._bursts, self._start_s) for each, seed in todo]
        self._done |= dict(zip(todo, self._pool.map(Run.simulate, runs), strict=True))
        return [Mean(each.name, [self._done[each, seed] for seed in chosen]) for each in scalers]


def compare(days: Days, start_s: float, console: Console) -> bool:
    """Compare at one start-up time. Return whether the planner kept what it promises."""
    searched = days.over(SEARCHED, 1)
    best = frontier(searched)
    kept = [pair for pair, mean in zip(SEARCHED, searched, strict=True) if mean in best or pair == DEFAULT]
    pairs = sorted(days.over(kept), key=lambda mean: mean.gpu_hours)
    still, ours = days.over([Ours(switches=False), Ours()])
    aims = [*days.over([Ours(aim) for aim in AIMS]), ours]
    table(f"Pods start in {start_s:.0f} s", [*pairs, still, *aims], console)
    table("Those that no other beats in both", frontier([*pairs, *aims]), console)
    for pair in frontier(pairs):
        against(pair, aims, console)
    return verdict(ours, pairs, console)


def against(pair: Mean, aims: Sequence[Mean], console: Console) -> None:
    """Print the GPU-hours with which the planner attains as much."""
    equals = [each for each in aims if each.attainment >= pair.attainment]
    if equals:
        cheapest = min(equals, key=lambda mean: mean.gpu_hours)
        share = cheapest.gpu_hours / pair.gpu_hours
        told = f"{share:.3f} of its GPU-hours, {cheapest.name} ({cheapest.attainment:.2%})"
    else:
        told = "the planner attains less at every aim"
    console.print(f"  to {pair.name} ({pair.attainment:.2%}, {pair.gpu_hours:.1f}): {told}")


def verdict(ours: Mean, pairs: Sequence[Mean], console: Console) -> bool:
    """Print and return whether the planner beats the pair that attains most; and, as that pair may be dear,
    print its share of the hours of the cheapest pair that attains as much as the planner."""
    best = max(pairs, key=lambda mean: (mean.attainment, -mean.gpu_hours))
    attains, ratio = ours.attainment >= best.attainment, ours.gpu_hours / best.gpu_hours
    _say(attains, f"attainment {ours.attainment:.2%} (>= {best.attainment:.2%}, the most of a pair)", console)
    _say(ratio <= RATIO, f"{ratio:.3f} of the GPU-hours of that pair, {best.name} (<= {RATIO})", console)
    equals = [each for each in pairs if each.attainment >= ours.attainment]
    if equals:
        rival = min(equals, key=lambda mean: mean.gpu_hours)
        share = ours.gpu_hours / rival.gpu_hours
        console.print(f"          {share:.3f} of those of the cheapest that attains as much, {rival.name}")
    return attains and ratio <= RATIO


def _say(met: bool, what: str, console: Console) -> None:
    console.print(f"  {'met   ' if met else 'MISSED'}  {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--starts", default="120")
    parser.add_argument("--bursts", type=int, default=BURSTS, help="sudden ones, of a day")
    parser.add_argument("--jobs", type=int, default=1, help="days at a time")
    given = parser.parse_args()
    console = Console(width=150)
    for line in conditions("loadtest.planner"):
        console.print(line)
    held = []
    with ProcessPoolExecutor(given.jobs) as pool:
        for start in map(float, given.starts.split(",")):
            days = Days(pool, given.seeds, given.hours, given.bursts, start)
            held.append(compare(days, start, console))
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
