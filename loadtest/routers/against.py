"""Two source trees in turns: what a token and a request cost the router of each."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton import ready
from loadtest.routers import fleet, fronts
from loadtest.routers.client import Plan
from loadtest.routers.fronts import Front
from loadtest.routers.measured import Measured, measure, steps_of
from loadtest.trees import HERE, python_path

WORKERS = 4
STEP_MS = 40.0
LEAST = 0.97
"""Of what a core did before."""
FIGURES: Mapping[str, Callable[[Measured], float]] = {
    "tokens": lambda one: one.tokens_per_core_s,
    "requests": lambda one: one.requests_per_core_s,
}


def run_against(chosen: argparse.Namespace, tmp: Path, console: Console) -> bool:
    """Both have a router and workers of their own, each of its own tree, whose protocol they speak. One at a
    time is asked, and the order changes with each round: neither has the warmer machine always."""
    streams = chosen.peer_streams
    seconds = chosen.seconds / 2
    plans = {
        "tokens": Plan(streams=streams, warm_up_s=2.0, seconds=seconds),
        "requests": Plan(streams=min(16, streams), warm_up_s=1.0, seconds=seconds, max_tokens=1),
    }
    done: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_side(tmp / name, name, tree))
            for name, tree in (("before", chosen.against), ("here", HERE))
        ]
        for number in range(chosen.repeats):
            for name, plan in plans.items():
                for front in sides if number % 2 == 0 else reversed(sides):
                    done[name, front.name].append(measure(front, plan))
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


def _tell(done: Mapping[tuple[str, str], list[Measured]], console: Console) -> bool:
    """The medians, and whether what is here does at least ``LEAST`` of what was done before."""
    shown = Table("", "before", "here", "here / before")
    held = True
    for name, figure in FIGURES.items():
        each = {side: [figure(one) for one in done[name, side]] for side in ("before", "here")}
        before, here = (statistics.median(each[side]) for side in ("before", "here"))
        held &= here / before >= LEAST
        shown.add_row(f"{name}/s of a core", f"{before:.0f}", f"{here:.0f}", f"{here / before:.3f}")
        shown.add_row("  each round", *(" ".join(f"{x:.0f}" for x in each[side]) for side in each), "")
        busy = [statistics.median(one.busy for one in done[name, side]) for side in each]
        shown.add_row("  of a core, then", *(f"{share:.0%}" for share in busy), "")
        failed = [sum(one.figures.failed for one in done[name, side]) for side in each]
        held &= failed[1] == 0
        shown.add_row("  failed", *map(str, failed), "")
    console.print(shown)
    console.print("VERDICT:", "held" if held else "MISSED", f"(at least {LEAST} of before, nothing failed)")
    return held
