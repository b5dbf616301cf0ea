"""Discovery against an API server that drops, stalls, loses events and answers 410, in random scripts.

    python -m loadtest.discovery --scripts 500
    python -m loadtest.discovery --scripts 24 --factor 1       # on the real clock

Each script is 15 s of changes to pods, up to seven a second, among which the API server fails; the real
client talks to it over HTTP. Fails (exit status 1) if the client still lists, more than 5 s later, a pod that
is gone or may not be given requests, or does not list a pod that may. With a factor, the clocks of client and
server run faster by it, and the bound is 5 s of that clock.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.support.chaos.campaign import percentile
from tests.support.discovery_scripts import BOUND_S, Outcome, run_scripts


def table(outcomes: list[Outcome], factor: float, took_s: float) -> Table:
    slowest = [outcome.slowest_s for outcome in outcomes]
    shown = Table("", "")
    for name, figure in (
        ("scripts", str(len(outcomes))),
        ("clock", f"{factor:g}x real time"),
        ("changes, faults", f"{sum(o.changes for o in outcomes)}, {sum(o.faults for o in outcomes)}"),
        ("lists", str(sum(o.lists for o in outcomes))),
        (
            "longest that a view was wrong, s: p50/p99/max",
            f"{percentile(slowest, 50):.2f} / {percentile(slowest, 99):.2f} / {max(slowest):.2f}",
        ),
        ("allowed, s", f"{BOUND_S:g}"),
        ("process kept from running, s a script, not counted", f"{_mean(o.starved_s for o in outcomes):.2f}"),
        ("seconds", f"{took_s:.0f}"),
        ("VIOLATIONS", str(sum(len(o.wrong) for o in outcomes))),
    ):
        shown.add_row(name, figure)
    return shown


def _mean(figures: Iterable[float]) -> float:
    found = list(figures)
    return sum(found) / len(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first script; each next has the next")
    parser.add_argument("--factor", type=float, default=10.0, help="how much faster clocks run")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each script, by its clock")
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # the scripts make thousands of warnings, and the fake server complains
    console = Console(stderr=True)

    def done(outcome: Outcome) -> None:
        for line in outcome.wrong:
            console.print(f"seed {outcome.seed}: {line}")

    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.scripts)
    outcomes = asyncio.run(run_scripts(seeds, options.factor, options.seconds, options.at_once, done))
    console.print(table(outcomes, options.factor, time.monotonic() - began))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
