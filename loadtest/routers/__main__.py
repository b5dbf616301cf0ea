"""A router before simulated workers: the cost of a token and of a request, and the delay of tokens.

    python -m loadtest.routers                   # latency of 2,000 streams at 60 % of a core
    scripts/router-peers .router-peers           # installs the peers, once
    python -m loadtest.routers --part peers --peers .router-peers
    python -m loadtest.routers --against ../before --repeats 9     # what it cost before, in another checkout

The workers and the client are on a core of their own. A token's way is the time from when its worker had it
until the client read it; the router adds the difference to the same load on the workers' own plain API,
quantile by quantile. Both are measured in turns, and the median over the rounds counts; beside it stands the
delay added to tokens on whose way other guests of the host took nothing. The router uses 60 % of a core, of
any core it is given, as in a pod; with ``--one-core`` of one core, on which gRPC's threads queue behind
Python's. The workers only talk (`loadtest.routers.fake_workers`), or they and the client would need more than
their core. The peers and Baton are on one core, before the same simulated workers (`baton worker-sim`), whose
plain API the peers pass on; all are asked in turns, and the figures are medians over the rounds. A core's
capacity is the work done over the share of its time that the router used.

With ``--against`` two source trees are measured: tokens and requests a second of a core of the router's, here
and there, each before simulated workers of its own tree. Both routers share a core and are asked at the same
time; each round starts all processes anew. The figure is the median of the rounds' ratios, with the range in
which the true one lies with a probability of 95 % (from six rounds on). Fails (exit status 1) if this tree
does less than 0.97 of what the other does, or if a request fails.
"""

from __future__ import annotations

import argparse
import bisect
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.conditions import conditions
from loadtest.routers import fleet, fronts
from loadtest.routers.against import run_against
from loadtest.routers.client import Plan
from loadtest.routers.measured import Measured, measure, steps_of
from loadtest.trees import tree
from tests.support.chaos.campaign import percentile
from tests.support.ring import Service

SHARE = 0.6
"""The share of a core's capacity at which latency is measured."""
MAX_MS = {50: 1.0, 99: 10.0}
FEW = 500
"""The fewest tokens with a meaningful 99th percentile."""


@dataclass(frozen=True)
class Ways:
    """The times that tokens were on their way, in ms."""

    all: list[float]
    undisturbed: list[float]
    """The times of tokens on whose way no other guest had the machine."""


def ways(tmp: Path, measured: Measured) -> Ways:
    """Return the times of the kept tokens, each from the last token that its worker had before the arrival.
    (The gap between a stream's tokens is far longer than these times.)"""
    since = min(times[0] for times in measured.figures.arrivals.values()) - 10 * 10**9
    said: dict[str, list[int]] = defaultdict(list)
    for (request, _), at in fleet.said_at(tmp, since).items():
        said[request.removesuffix("-0")].append(at)
    found = Ways([], [])
    for request, arrivals in measured.figures.arrivals.items():
        times = sorted(said.get(request, ()))
        for arrived in arrivals:
            before = bisect.bisect_right(times, arrived)
            if before:
                begun = times[before - 1]
                found.all.append((arrived - begun) / 1e6)
                if not measured.stolen.disturbed(begun, arrived):
                    found.undisturbed.append(found.all[-1])
    return found


@dataclass(frozen=True)
class Round:
    """A load, once through a router and once without one."""

    through: Measured
    direct: Measured
    ways: Ways
    direct_ways: Ways

    def without(self, share: int) -> float:
        """Return this percentile of a token's way without a router, in ms."""
        return percentile(self.direct_ways.all, share)

    def added(self, share: int) -> float:
        """Return the time added to a token's way, in ms: the difference of this percentile."""
        return percentile(self.ways.all, share) - self.without(share)

    def added_undisturbed(self, share: int) -> float:
        """Return the time added to tokens on whose way no other guest had the machine, in ms: the difference
        of this percentile; NaN if there are too few."""
        through, direct = self.ways.undisturbed, self.direct_ways.undisturbed
        if min(len(through), len(direct)) < FEW:
            return math.nan
        return percentile(through, share) - percentile(direct, share)


def one_round(folder: Path, chosen: argparse.Namespace, rate: float, plan: Plan) -> Round:
    folder.mkdir()
    with fleet.fake_workers(folder, chosen.workers, chosen.streams / rate * 1e3) as fake_workers:
        direct = measure(fronts.none(fake_workers), plan)
        direct_ways = ways(folder, direct)
        with fronts.baton_before(folder, fake_workers.addresses, confined=chosen.one_core) as front:
            through = measure(front, plan)
        return Round(through, direct, ways(folder, through), direct_ways)


def run_latency(chosen: argparse.Namespace, tmp: Path, console: Console) -> bool:
    """Measure at a rate that should take ``SHARE`` of a core, by a token's cost in the round before; the
    first round only finds that cost. Each round measures without a router, then with it."""
    # 2,000 streams are open only when all have begun, and to begin them fills a core for some seconds.
    plan = Plan(
        streams=chosen.streams, warm_up_s=12.0, seconds=chosen.seconds, max_tokens=1000, stagger_s=6.0
    )
    rate = chosen.tokens_per_s
    rounds: list[Round] = []
    for number in range(1 + chosen.repeats):
        rounds.append(one_round(tmp / str(number), chosen, rate, plan))
        measured = rounds[-1].through
        console.print(
            f"{_per_s(measured):.0f} tokens/s of {chosen.streams} streams take {measured.busy:.0%} of a core"
        )
        rate = SHARE * measured.tokens_per_core_s
    _tell_rounds(rounds[1:], console)
    held = not any(each.through.figures.failed for each in rounds)
    for share, most in MAX_MS.items():
        held &= statistics.median(each.added(share) for each in rounds[1:]) <= most
    console.print("VERDICT:", "held" if held else "MISSED", "(p50 at most 1 ms, p99 at most 10 ms)")
    return held


def _tell_rounds(rounds: list[Round], console: Console) -> None:
    shown = Table("", *(f"round {number}" for number in range(1, len(rounds) + 1)), "median")

    def row(title: str, figure: Callable[[Round], float], form: str) -> None:
        figures = [figure(each) for each in rounds]
        known = [each for each in figures if not math.isnan(each)] or [math.nan]
        shown.add_row(title, *(form.format(each) for each in (*figures, statistics.median(known))))

    row("tokens/s", lambda each: _per_s(each.through), "{:.0f}")
    row("  without a router", lambda each: _per_s(each.direct), "{:.0f}")
    row("of a core", lambda each: each.through.busy, "{:.0%}")
    row("a core's capacity, tokens/s", lambda each: each.through.tokens_per_core_s, "{:.0f}")
    row("failed", lambda each: each.through.figures.failed, "{:.0f}")
    row(
        "taken by other guests, of a core",
        lambda each: each.through.stolen.seconds / each.through.figures.seconds,
        "{:.1%}",
    )
    for share in MAX_MS:
        row(f"added to a token's way, p{share}, ms", partial(Round.added, share=share), "{:.2f}")
        row("  without a router, all of it", partial(Round.without, share=share), "{:.2f}")
        row("  where nothing was taken", partial(Round.added_undisturbed, share=share), "{:.2f}")
    row("  such tokens", lambda each: len(each.ways.undisturbed) / len(each.ways.all), "{:.0%}")
    console.print(shown)


def _per_s(measured: Measured) -> float:
    return measured.figures.events / measured.figures.seconds


def run_peers(chosen: argparse.Namespace, tmp: Path, console: Console) -> bool:
    """Measure tokens of long answers and requests of one token, by each router in turns."""
    plans = {
        "tokens": Plan(streams=chosen.peer_streams, warm_up_s=2.0, seconds=chosen.seconds / 2),
        "requests": Plan(
            streams=min(16, chosen.peer_streams), warm_up_s=1.0, seconds=chosen.seconds / 2, max_tokens=1
        ),
    }
    done: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    profile = tmp / "profile.json"
    profile.write_bytes(steps_of(40.0))
    options = ("--profile", str(profile), "--max-num-seqs", "512")
    with ExitStack() as stack:
        workers: list[Service] = stack.enter_context(fleet.workers(tmp, 4, *options))
        every = [
            stack.enter_context(fronts.baton(tmp, workers)),
            stack.enter_context(fronts.litellm(tmp, workers, chosen.peers)),
            stack.enter_context(fronts.vllm_router(tmp, workers, chosen.peers)),
        ]
        for _ in range(chosen.repeats):
            for name, plan in plans.items():
                for front in every:
                    streams = chosen.litellm_streams if front.name.startswith("LiteLLM") else plan.streams
                    asked = msgspec.structs.replace(plan, streams=min(streams, plan.streams))
                    done[name, front.name].append(measure(front, asked))
    shown = Table("", *(front.name for front in every))
    rows = {
        "tokens/s of a core": ("tokens", lambda one: one.tokens_per_core_s),
        "requests/s of a core": ("requests", lambda one: one.requests_per_core_s),
    }
    ratios: dict[tuple[str, str], float] = {}
    for title, (name, figure) in rows.items():
        medians = [statistics.median(map(figure, done[name, front.name])) for front in every]
        shown.add_row(title, *(f"{median:.0f}" for median in medians))
        for front, median in zip(every[1:], medians[1:], strict=True):
            ratios[title, front.name] = medians[0] / median
        shown.add_row("  Baton's, of it", "", *(f"{medians[0] / m:.2f}x" for m in medians[1:]))
        busy = [statistics.median(one.busy for one in done[name, front.name]) for front in every]
        shown.add_row("  of a core, then", *(f"{share:.0%}" for share in busy))
        failed = [sum(one.figures.failed for one in done[name, front.name]) for front in every]
        shown.add_row("  failed", *map(str, failed))
    console.print(shown)
    held = all(ratio >= 3 for (_, name), ratio in ratios.items() if name.startswith("LiteLLM"))
    console.print("VERDICT:", "held" if held else "MISSED", "(3x the peer in Python)")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("latency", "peers"), default="latency")
    parser.add_argument("--against", type=tree, metavar="DIR", help="compare with this other source tree")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--one-core", action="store_true", help="confine the router to its core")
    parser.add_argument("--tokens-per-s", type=float, default=7500.0, help="in the first run")
    parser.add_argument("--seconds", type=float, default=30.0, help="of what is measured")
    parser.add_argument("--peers", type=Path, default=Path(".router-peers"))
    parser.add_argument("--peer-streams", type=int, default=128)
    parser.add_argument("--litellm-streams", type=int, default=32, help="what it can stand")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    chosen = parser.parse_args()
    console = Console(width=120)
    for line in conditions("loadtest.routers"):
        console.print(line, soft_wrap=True)
    part = run_latency if chosen.part == "latency" else run_peers
    if chosen.against is not None:
        part = run_against
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if part(chosen, Path(scratch), console) else 1


if __name__ == "__main__":
    raise SystemExit(main())
