"""Two source trees beside one another: the cost of a token and of a request at the router of each.

Asked in turns, even two routers of one tree may differ by a tenth. So both are asked at the same time, and
the figure is their ratio in each round. It still differs by some hundredths from one start of the processes
to the next, so each round has processes of its own. The cost of sharing a core is in both figures, which
makes their difference seem a little smaller than it is.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.process import ready
from loadtest.routers import fleet, fronts
from loadtest.routers.client import Plan
from loadtest.routers.fronts import Front
from loadtest.routers.measured import Measured, measure, steps_of
from loadtest.trees import HERE, python_path

WORKERS = 4
STEP_MS = 40.0
LEAST = 0.97
"""The least share of the other tree's rate that this tree must reach."""
FIGURES: Mapping[str, Callable[[Measured], float]] = {
    "tokens": lambda one: one.tokens_per_core_s,
    "requests": lambda one: one.requests_per_core_s,
}


@dataclass(frozen=True)
class SideBySide:
    """The routers of both trees, measured at the same time."""

    before: Measured
    here: Measured


def run_against(chosen: argparse.Namespace, tmp: Path, console: Console) -> bool:
    """Measure both trees, each with a router and workers of its own, as each speaks a protocol of its own.
    The tree that is started first changes with each round."""
    streams = chosen.peer_streams
    seconds = chosen.seconds / 2
    plans = {
        "tokens": Plan(streams=streams, warm_up_s=2.0, seconds=seconds),
        "requests": Plan(streams=min(16, streams), warm_up_s=1.0, seconds=seconds, max_tokens=1),
    }
    trees = {"before": chosen.against, "here": HERE}
    done: dict[str, list[SideBySide]] = defaultdict(list)
    for number in range(chosen.repeats):
        names = sorted(trees, reverse=number % 2 == 1)
        with ExitStack() as stack:
            started = ((tmp / f"{number}-{name}", name, trees[name]) for name in names)
            sides = [stack.enter_context(_side(*each)) for each in started]
            for kind, plan in plans.items():
                with ThreadPoolExecutor(len(sides)) as at_once:
                    measured = at_once.map(partial(measure, plan=plan), sides)
                    done[kind].append(SideBySide(**dict(zip(names, measured, strict=True))))
    return _tell(done, console)


@contextmanager
def _side(tmp: Path, name: str, tree: Path) -> Iterator[Front]:
    """A router before simulated workers, all of one tree."""
    tmp.mkdir()
    profile = tmp / "profile.json"
    profile.write_bytes(steps_of(STEP_MS))
    environment = {"PYTHONPATH": python_path(tree)}
    options = ("--profile", str(profile), "--max-num-seqs", "512")
    with fleet.workers(tmp, WORKERS, *options, environment=environment) as workers:
        addresses = tuple(w.ready.address for w in workers if isinstance(w.ready, ready.WorkerReady))
        with fronts.baton_before(tmp, addresses, confined=True, environment=environment) as front:
            yield Front(name, front.urls, front.pids)


def _tell(done: Mapping[str, list[SideBySide]], console: Console) -> bool:
    """Print the medians, and return whether this tree does at least ``LEAST`` of what the other does."""
    shown = Table("", "before", "here", "here / before")
    held = True
    for kind, figure in FIGURES.items():
        sides = [pair.before for pair in done[kind]], [pair.here for pair in done[kind]]
        each = [[figure(one) for one in side] for side in sides]
        ratios = [here / before for before, here in zip(*each, strict=True)]
        ratio = statistics.median(ratios)
        low, high = median_interval(ratios)
        held &= ratio >= LEAST
        medians = (f"{statistics.median(side):.0f}" for side in each)
        shown.add_row(f"{kind}/s of a core", *medians, f"{ratio:.3f} ({low:.3f} to {high:.3f})")
        rounds = (" ".join(f"{x:.0f}" for x in side) for side in each)
        shown.add_row("  each round", *rounds, " ".join(f"{x:.2f}" for x in ratios))
        busy = (statistics.median(one.busy for one in side) for side in sides)
        shown.add_row("  of a core, then", *(f"{share:.0%}" for share in busy), "")
        failed = [sum(one.figures.failed for one in side) for side in sides]
        held &= failed[1] == 0
        shown.add_row("  failed", *map(str, failed), "")
    console.print(shown)
    console.print("VERDICT:", "held" if held else "MISSED", f"(at least {LEAST} of before, nothing failed)")
    return held


def median_interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the two ``figures`` between which the median of all possible measurements lies, with a
    probability of 95 %; the smallest and the largest where there are fewer than six."""
    ranked, count = sorted(figures), len(figures)
    outside, cut = 2 * 0.5**count, 0
    while cut + 1 < count // 2:
        outside += 2 * math.comb(count, cut + 1) * 0.5**count
        if outside > 0.05:
            break
        cut += 1
    return ranked[cut], ranked[-1 - cut]
