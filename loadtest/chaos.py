"""Chaos on real processes: workers are killed and stopped, clients leave and connections are cut at random
moments under load, with checksums on. Every answer is compared with the true one, token by token.

    python -m loadtest.chaos --connector tcp,ucx,nixl,gloo --rounds 500 --restarts 100 --cancels 200

Fails (exit status 1) on a wrong token in a delivered answer, a request that hangs or fails without a name,
blocks that survivors hold 45 s after the last request (at the 99th percentile, 1 s after an ordinary cancel),
a worker that ends by itself, an error in a log, and on a fault that did not take effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.support.chaos import connections
from tests.support.chaos.campaign import SHARES, Plan, Report, percentile, run
from tests.support.chaos.catalogue import LARGE_BLOCKS, record

KINDS = ("tcp", "ucx", "ucx-shm", "ucx-tcp", "nixl", "gloo", "nccl")


def spread(seconds: list[float]) -> str:
    """Return the median, 99th percentile and maximum."""
    if not seconds:
        return "-"
    figures = (percentile(seconds, 50), percentile(seconds, 99), max(seconds))
    return " / ".join(f"{figure:.2f}" for figure in figures)


def rows(report: Report) -> list[tuple[str, str]]:
    faults = ", ".join(f"{count} {name}" for name, count in sorted(report.faults.items()))
    failed = ", ".join(f"{count} {name}" for name, count in sorted(report.failed.items()))
    restarts = report.restarts_s
    return [
        ("model", report.model),
        ("seed", str(report.seed)),
        ("rounds, s each", f"{report.rounds}, {report.round_s:.2f}"),
        ("faults, all verified", faults or "-"),
        ("answers, all true", f"{report.completed} ({report.tokens} tokens)"),
        ("failed by name", failed or "-"),
        ("slowest request, s", f"{report.slowest_s:.1f}"),
        ("rests; s to zero: p50/p99/max", f"{len(report.to_zero_s)}; {spread(report.to_zero_s)}"),
        ("cancels; s to zero", f"{len(report.cancels_s)}; {spread(report.cancels_s)}"),
        *((f"restarts of {role}; s to a handoff", f"{len(s)}; {spread(s)}") for role, s in restarts.items()),
        ("retired workers", str(report.retired)),
        ("more files, threads at rest", f"{report.most_fds}, {report.most_threads}"),
        ("seconds", f"{report.seconds:.0f}"),
        ("VIOLATIONS", str(len(report.violations))),
    ]


def table(reports: list[Report]) -> Table:
    shown = Table("", *(report.kind for report in reports))
    for cells in zip(*(rows(report) for report in reports), strict=True):
        shown.add_row(cells[0][0], *(figure for _, figure in cells))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connector",
        default="tcp",
        help=f"some of {','.join(KINDS)}; ucx-shm and ucx-tcp are ucx over shared memory or TCP alone",
    )
    parser.add_argument(
        "--model",
        default=LARGE_BLOCKS,
        help=f"demo, a directory, or a tiny model of tests.support.family_models; default: {LARGE_BLOCKS}",
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds of one fault each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round later than that")
    parser.add_argument(
        "--faults", default=",".join(SHARES), help="the kinds of faults in these rounds; default: %(default)s"
    )
    parser.add_argument("--restarts", type=int, default=0, help="restarts of each role at the same address")
    parser.add_argument("--cancels", type=int, default=0, help="ordinary cancels, without other faults")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="where the workers' logs go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the workers
    kinds = options.connector.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--connector: {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
    faults = options.faults.split(",")
    if unknown := set(faults) - set(SHARES):
        parser.error(f"--faults: {', '.join(unknown)}; allowed: {', '.join(SHARES)}")
    if reason := connections.why_not():
        parser.error(reason)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    console = Console()
    torch.set_num_threads(1)  # the oracle is tiny, and the cores are needed elsewhere
    catalogue = record(logs, options.seed, options.model)
    console.print(f"{len(catalogue.questions)} questions; seed {options.seed}; logs in {logs}")
    reports = []
    for kind in kinds:
        plan = Plan(
            kind=kind,
            seed=options.seed,
            rounds=options.rounds,
            restarts=options.restarts,
            cancels=options.cancels,
            clients=options.clients,
            max_s=options.seconds,
            faults={name: SHARES[name] for name in faults},
        )
        report = run(logs / kind, catalogue, plan)
        reports.append(report)
        for violation in report.violations:
            print(f"{kind}, seed {options.seed}, {violation}\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    console.print(table(reports))
    return int(any(report.violations for report in reports))


if __name__ == "__main__":
    raise SystemExit(main())
