"""Workers take other roles at random moments under requests of all kinds: two prefill and two decode workers,
of the demo model unless ``--model`` says otherwise, and a router, as real processes.

    python -m loadtest.switches --switches 40 --seed 1

Fails (exit status 1) unless every answer is complete and the same, token for token, as undisturbed, with no
token twice or lost, and no error; and unless every switch went through. A quarter of the switches are given
less time than answers under way take, and break these off. Reports how long switches took, what they added
between two tokens of a stream, and how long a fresh start of the same worker takes beside them.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.lost_streams import listed, spread
from tests.support.chaos.streams import Plan, Report
from tests.support.chaos.switches import Switches, run


def table(report: Report, done: Switches) -> Table:
    shown = Table("", "")
    shown.add_row("model", report.model)
    shown.add_row("seed", str(report.seed))
    shown.add_row("switches", f"{sum(report.events.values())}: {listed(dict(sorted(report.events.items())))}")
    shown.add_row("a switch, s: p50 / p99 / max", spread(done.seconds))
    shown.add_row("a switch that cut answers off, s", spread(done.cut_seconds))
    shown.add_row("until the router gave it requests, s", spread(done.ready_seconds))
    shown.add_row("a fresh start, s", spread(done.start_seconds))
    shown.add_row("answers, complete and true", str(report.answers))
    shown.add_row("tokens in them", str(report.tokens))
    shown.add_row("questions; dropped: undisturbed answers differ", f"{report.questions}; {report.dropped}")
    for cause, count in sorted(report.interrupted.items()):
        shown.add_row(f"attempts ended: {cause}", f"{count:g}")
    for cause, seconds in sorted(report.pauses_s.items()):
        shown.add_row(f"pause added, s ({cause}): p50 / p99 / max", spread(seconds))
    for cause, seconds in sorted(report.first_tokens_s.items()):
        shown.add_row(f"from there to the first token, s ({cause})", spread(seconds))
    shown.add_row("as the router counts", listed(report.resumes))
    shown.add_row("VIOLATIONS", str(len(report.violations)))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--switches", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no switch later than that")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--longest", type=int, default=160, help="tokens of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", default="demo", help="demo, a directory, or a tiny model of tests.support.family_models"
    )
    parser.add_argument("--logs", type=Path, help="where the logs go; default: a temporary folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the workers
    logs = options.logs or Path(tempfile.mkdtemp(prefix="baton-switches-"))
    plan = Plan(
        seed=options.seed,
        events=options.switches,
        clients=options.clients,
        questions=options.questions,
        longest=options.longest,
        max_s=options.seconds,
        model=options.model,
    )
    report, done = run(logs, plan)
    Console(width=160).print(table(report, done))
    for violation in report.violations[:20]:
        print(f"VIOLATION: {violation}")
    print(f"{report.seconds:.0f} s; logs in {logs}")
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
