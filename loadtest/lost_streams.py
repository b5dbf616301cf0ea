"""Workers are killed (SIGKILL) and drained (SIGTERM) under requests of all kinds: two prefill and two decode
workers, of the demo model unless ``--model`` says otherwise, and a router, as real processes; a worker that
ends is started again.

    python -m loadtest.lost_streams --events 200 --seed 1 --json streams.json

Fails (exit status 1) unless every answer is complete and the same, token for token, as undisturbed, with no
token twice or lost, and no error. Reports what an interruption added between two tokens. ``--json`` adds the
run to the runs that the file has, and the table is of all of them. Workers compute in float32, whose tokens
do not depend on what else a step computes.

    python -m loadtest.lost_streams --dtype bfloat16 --resumed 1000 --clients 64 --json rates.json

Has decode workers stopped, drained and killed until that many answers went on elsewhere after their first
token, and prints how many of them have other tokens than in calm, beside how many answers differ between two
calm runs of the same requests by as many clients: rounding by batch. Fails in float32 if one differs, and in
any type if an answer is not complete.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.chaos.resumed import Rates, measure
from tests.support.chaos.streams import EVENTS, Plan, Report, run


def spread(seconds: Sequence[float]) -> str:
    """Return the number of values, and their median, 99th percentile and maximum."""
    if not seconds:
        return "0"
    ordered = sorted(seconds)
    p50, p99 = (ordered[max(0, math.ceil(len(ordered) * p) - 1)] for p in (0.5, 0.99))
    return f"{len(ordered)}: {p50:.2f} / {p99:.2f} / {ordered[-1]:.2f}"


def total(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counter in counters:
        for name, count in counter.items():
            found[name] = found.get(name, 0) + count
    return dict(sorted(found.items()))


def joined(found: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    all_of: dict[str, list[float]] = {}
    for each in found:
        for cause, seconds in each.items():
            all_of.setdefault(cause, []).extend(seconds)
    return dict(sorted(all_of.items()))


def listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name.removeprefix('baton_')}" for name, count in counts.items())


def table(reports: Sequence[Report]) -> Table:
    shown = Table("", "")
    shown.add_row("models", ", ".join(dict.fromkeys(report.model for report in reports)))
    shown.add_row("seeds", ", ".join(str(report.seed) for report in reports))
    events = total(report.events for report in reports)
    for event in EVENTS:
        shown.add_row(event, f"{events.get(event, 0):g}")
    shown.add_row("answers, complete and true", str(sum(report.answers for report in reports)))
    shown.add_row("tokens in them", str(sum(report.tokens for report in reports)))
    questions, dropped = (
        sum(each) for each in zip(*((r.questions, r.dropped) for r in reports), strict=True)
    )
    shown.add_row("questions; dropped: undisturbed answers differ", f"{questions}; {dropped}")
    for cause, count in total(report.interrupted for report in reports).items():
        shown.add_row(f"attempts ended: {cause}", f"{count:g}")
    for cause, seconds in joined(report.pauses_s for report in reports).items():
        shown.add_row(f"pause added, s ({cause}): p50 / p99 / max", spread(seconds))
    for cause, seconds in joined(report.first_tokens_s for report in reports).items():
        shown.add_row(f"from there to the first token, s ({cause})", spread(seconds))
    shown.add_row("of the interrupted, with", listed(total(report.features for report in reports)))
    shown.add_row("as the router counts", listed(total(report.resumes for report in reports)))
    shown.add_row("VIOLATIONS", str(sum(len(report.violations) for report in reports)))
    return shown


def rates_table(rates: Rates) -> Table:
    shown = Table("", "")
    shown.add_row("dtype; clients", f"{rates.dtype}; {rates.clients}")
    for event, count in sorted(rates.events.items()):
        shown.add_row(event, str(count))
    for name, count, differ in (
        ("two calm runs of the same requests: answers", rates.calm, rates.calm_differ),
        ("answers not interrupted, among workers that end", rates.undisturbed, rates.undisturbed_differ),
        ("RESUMED answers", rates.resumed, rates.resumed_differ),
    ):
        shown.add_row(f"{name}; of other tokens", f"{count}; {differ} ({differ / max(1, count):.2%})")
    shown.add_row("tokens in resumed answers", str(rates.tokens))
    shown.add_row("VIOLATIONS", str(len(rates.violations)))
    return shown


def measure_rates(logs: Path, plan: Plan, wanted: int, told: Path | None) -> bool:
    """Return whether all is as it must be."""
    rates = measure(logs, plan, wanted)
    if told:
        told.write_text(json.dumps(vars(rates), indent=1))
    Console(width=160).print(rates_table(rates))
    for line in (*rates.differences[:10], *(f"VIOLATION: {each}" for each in rates.violations[:20])):
        print(line)
    print(f"{rates.seconds:.0f} s; logs in {logs}")
    if rates.resumed < wanted:
        print(f"only {rates.resumed} answers were resumed within --seconds")
    exact = plan.dtype != "float32" or not (rates.resumed_differ or rates.calm_differ)
    return exact and not rates.violations and rates.resumed >= wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=200, help="of all kinds, in any order")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no event later than that")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--longest", type=int, default=160, help="tokens of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", default="demo", help="demo, a directory, or a tiny model of tests.support.family_models"
    )
    parser.add_argument("--dtype", default="float32", help="what workers compute in")
    parser.add_argument("--resumed", type=int, help="measure rates, until so many answers were resumed")
    parser.add_argument("--logs", type=Path, help="where the logs go; default: a temporary folder")
    parser.add_argument(
        "--json", type=Path, help="add the figures to those in this file; with --resumed, write them"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the workers
    logs = options.logs or Path(tempfile.mkdtemp(prefix="baton-streams-"))
    plan = Plan(
        seed=options.seed,
        events=options.events,
        clients=options.clients,
        questions=options.questions,
        longest=options.longest,
        max_s=options.seconds,
        model=options.model,
        dtype=options.dtype,
    )
    if options.resumed is not None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        sys.exit(not measure_rates(logs, plan, options.resumed, options.json))
    report = run(logs, plan)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    reports = [*(Report(**each) for each in known), report]
    if options.json:
        options.json.write_text(json.dumps([vars(each) for each in reports], indent=1))
    Console(width=160).print(table(reports))
    for violation in report.violations[:20]:
        print(f"VIOLATION: {violation}")
    print(f"{report.seconds:.0f} s; logs in {logs}")
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
