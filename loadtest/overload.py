"""A router that is asked five times what its workers can do.

    python -m loadtest.overload

First the rate is raised up to and beyond the (simulated) workers' capacity: the best goodput, in answers a
second that begin and end in time, is the peak. Then five times the peak is asked, by three equal tenants with
weights of 1, 2 and 1. Fails (exit status 1) if goodput falls below 0.9 of the peak, if a refusal takes 50 ms
or more, or if a tenant's part is off its share by more than a tenth. Refusals are timed from the client's
write to the head of the answer; client and workers have a core of their own beside the router's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.table import Table

from baton.router.security.keys import entry_line, new_key
from loadtest.conditions import conditions
from loadtest.routers import fleet, fronts
from loadtest.routers.arrivals import Arrivals, Outcome, Tenant
from tests.support.chaos.campaign import percentile

WEIGHTS = {"red": 1.0, "green": 2.0, "blue": 1.0}
STEP_MS = 20.0
SEATS = 16
PROMPT_TOKENS = 64
MAX_TOKENS = 64
FIRST_S = 2.0
"""The time within which an answer must begin, in seconds."""
WHOLE_S = 5.0
MAX_QUEUE_WAIT = "1"
"""The longest wait in the router's queue, in seconds, out of FIRST_S: a part of these is spent waiting on the
workers, and the router's estimate may be wrong."""
MIN_GOODPUT = 0.9
MAX_REFUSAL_S = 0.05
MAX_OFF = 0.1
SETTLE_S = 5.0
"""The time until the load is steady, in seconds; earlier requests do not count."""


def keys_file(tmp: Path) -> tuple[Path, list[Tenant]]:
    tenants = [Tenant(name, new_key(), weight) for name, weight in WEIGHTS.items()]
    lines = ["tenants:"]
    lines += [f"  {tenant.name}: {{weight: {tenant.weight:g}}}" for tenant in tenants]
    lines += ["keys:", *(entry_line(tenant.key, tenant.name, tenant.name) for tenant in tenants)]
    path = tmp / "keys.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path, tenants


def counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    began = min(outcome.sent_at for outcome in outcomes)
    return [outcome for outcome in outcomes if outcome.sent_at - began >= SETTLE_S]


def in_time(outcome: Outcome) -> bool:
    whole = outcome.status == 200 and outcome.whole_s is not None and outcome.whole_s <= WHOLE_S
    return whole and outcome.first_s is not None and outcome.first_s <= FIRST_S


def goodput(outcomes: Sequence[Outcome], seconds: float) -> float:
    return sum(map(in_time, outcomes)) / seconds


def summary(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    statuses = Counter(outcome.status for outcome in outcomes)
    served = [outcome.whole_s for outcome in outcomes if outcome.status == 200 and outcome.whole_s]
    first = [outcome.first_s for outcome in outcomes if outcome.first_s is not None]
    return [
        f"{len(outcomes) / seconds:.0f}",
        f"{goodput(outcomes, seconds):.1f}",
        ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
        f"{percentile(first, 50):.2f} / {percentile(first, 99):.2f}" if first else "-",
        f"{percentile(served, 50):.2f} / {percentile(served, 99):.2f}" if served else "-",
    ]


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return each tenant's part of all tokens, over the part that it should have: 1 is right."""
    got: Counter[str] = Counter()
    for outcome in outcomes:
        got[outcome.tenant] += outcome.tokens
    whole = sum(WEIGHTS.values())
    return {name: got[name] / got.total() * whole / weight for name, weight in WEIGHTS.items()}


def measure(url: str, tenants: Sequence[Tenant], chosen: argparse.Namespace, console: Console) -> bool:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    arrivals = Arrivals(where.hostname, where.port, tenants, PROMPT_TOKENS, MAX_TOKENS)
    could = chosen.workers * SEATS / (STEP_MS / 1e3 * (MAX_TOKENS + 1))
    rates = Table("asked, of what the workers could do", "a second", "in time", "answers", "TTFT", "whole, s")
    seconds = chosen.seconds - SETTLE_S
    peak = 0.0
    outcomes: list[Outcome] = []
    for share in (0.7, 0.85, 1.0, 1.2, chosen.times):
        outcomes = counted(uvloop.run(arrivals.run(could * share, chosen.seconds)))
        arrivals.idle.clear()
        if share != chosen.times:
            peak = max(peak, goodput(outcomes, seconds))
        rates.add_row(f"{share:g}x", *summary(outcomes, seconds))
    console.print(rates)
    shown = Table("", "")
    kept = goodput(outcomes, seconds) / peak if peak else 0.0
    refused = [outcome.head_s for outcome in outcomes if outcome.status in (429, 503)]
    late = sum(took >= MAX_REFUSAL_S for took in refused)
    of = shares(outcomes)
    shown.add_row(f"goodput at {chosen.times:g}x, of its peak of {peak:.1f}/s", f"{kept:.2f} (at least 0.9)")
    took = (percentile(refused, 50), percentile(refused, 99), max(refused))
    most = " / ".join(f"{1e3 * seconds:.1f}" for seconds in took)
    shown.add_row("refusals, ms: p50 / p99 / most", most)
    shown.add_row("refusals of 50 ms or more, of", f"{late}, {len(refused)}")
    shown.add_row("what tenants got, of their shares", ", ".join(f"{n} {s:.3f}" for n, s in of.items()))
    others = {outcome.status for outcome in outcomes} - {200, 429, 503}
    fair = all(abs(share - 1) <= MAX_OFF for share in of.values())
    fine = kept >= MIN_GOODPUT and not late and fair and not others
    shown.add_row("VERDICT", "ok" if fine else "FAILED")
    console.print(shown)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=35.0, help="of each rate")
    chosen = parser.parse_args()
    console = Console(width=140)
    for line in conditions("loadtest.overload"):
        console.print(line, soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch:
        tmp = Path(scratch)
        profile = {"step_base_ms": STEP_MS, "step_row_ms": 0, "context_ms_per_1k": 0, "prefill_ms_per_1k": 0}
        (tmp / "profile.json").write_text(json.dumps(profile))
        file, tenants = keys_file(tmp)
        options = ("--profile", str(tmp / "profile.json"), "--max-num-seqs", str(SEATS))
        with (
            fleet.workers(tmp, chosen.workers, *options) as workers,
            fronts.baton(tmp, workers, "--api-keys", str(file), "--max-queue-wait", MAX_QUEUE_WAIT) as front,
        ):
            os.sched_setaffinity(0, {fleet.OTHERS_CORE})
            return int(not measure(front.urls[0], tenants, chosen, console))


if __name__ == "__main__":
    sys.exit(main())
