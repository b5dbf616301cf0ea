"""New revisions are rolled out under load, as Deployments do it with what the chart says, and no client may
notice more than a pause.

    python -m loadtest.rollout
    python -m loadtest.rollout --real

Two routers and two Deployments of simulated workers, rendered from the chart, run as processes before an API
server of the tests' own; pods are made, found ready, deleted and killed as kubelets and controllers would,
with delays like theirs. Exit status 1 unless every request is answered in full with the tokens that workers
of its revision say, no KV block went from one revision to another by the workers' own records, and every pod
ended in order. ``--real``: real workers with the demo model instead; one of each role at a time is drained
and started again, and every answer must be the same, token for token, as undisturbed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.conditions import conditions
from loadtest.lost_streams import table as drained_table
from tests.support.chaos import streams
from tests.support.chaos.campaign import percentile
from tests.support.rollout.run import Plan, Report, Stage, run, total
from tests.support.rollout.scenarios import SCENARIOS


def spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    return f"{percentile(ordered, 50):.3f} / {percentile(ordered, 99):.3f} / {ordered[-1]:.3f}"


def table(report: Report) -> Table:
    shown = Table(
        "while", "s", "answers", "tokens", "failed", "wrong", "two revisions", "first token, s", "pauses, s"
    )
    for name, stage in (*report.stages.items(), ("all", total(report.stages))):
        shown.add_row(name, *_row(stage))
    return shown


def _row(stage: Stage) -> tuple[str, ...]:
    return (
        f"{stage.seconds:.0f}",
        str(stage.answers),
        str(stage.tokens),
        str(len(stage.failures)),
        str(len(stage.wrong)),
        str(stage.resumed_elsewhere),
        spread(stage.first_s),
        spread(stage.gaps_s),
    )


def lines(report: Report) -> list[str]:
    found, whole = report.handoffs, total(report.stages)
    pairs = ", ".join(f"{count} {a} > {b}" for (a, b), count in sorted(found.pairs.items()))
    return [
        f"worker pods: {report.pods}; requests by kind: {dict(whole.kinds)}",
        f"handoffs by the workers' records: {found.total} ({pairs}), {found.one_ended} seen by one end",
        f"handoffs between revisions: {found.cross}; links refused for a revision: {found.refused}",
        *(f"{name}: {value:g}" for name, value in sorted(report.counted.items())),
    ]


def simulated(options: argparse.Namespace, logs: Path, console: Console) -> list[str]:
    """Roll out revisions of simulated workers; return the violations."""
    plan = Plan(
        scenarios=options.scenario or tuple(SCENARIOS),
        seed=options.seed,
        replicas=options.replicas,
        clients=options.clients,
        seats=options.seats,
    )
    report = run(logs, plan)
    console.print(table(report))
    for line in lines(report):
        console.print(line, highlight=False)
    if options.json:
        options.json.write_text(json.dumps(_figures(report), indent=1))
    return report.violations


def _figures(report: Report) -> dict[str, object]:
    rows = {name: _row(stage) for name, stage in report.stages.items()}
    return {"stages": rows, "lines": lines(report), "violations": report.violations}


def real(options: argparse.Namespace, logs: Path, console: Console) -> list[str]:
    """Restart real workers one at a time; return the violations."""
    plan = streams.Plan(
        seed=options.seed,
        events=options.drains * len(streams.DRAINS),
        clients=options.clients,
        questions=40,
        longest=160,
        kinds=streams.DRAINS,
    )
    report = streams.run(logs, plan)
    console.print(drained_table([report]))
    return report.violations


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", action="append", choices=tuple(SCENARIOS), help="default: all of them")
    parser.add_argument("--replicas", type=int, default=2, help="of each role")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seats", type=int, default=256, help="answers that a decode worker writes at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="drain real workers with the demo model")
    parser.add_argument("--drains", type=int, default=1, help="of each role, with --real")
    parser.add_argument("--logs", type=Path, help="where the logs go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops what was started
    logs = options.logs or Path(tempfile.mkdtemp(prefix="baton-rollout-"))
    logs.mkdir(parents=True, exist_ok=True)
    console, began = Console(width=160), time.monotonic()
    wrong = (real if options.real else simulated)(options, logs, console)
    for each in wrong[:20]:
        print(f"VIOLATION: {each}")
    print(f"{len(wrong)} violations; {time.monotonic() - began:.0f} s; logs in {logs}")
    print("\n".join(conditions("loadtest.rollout")))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
