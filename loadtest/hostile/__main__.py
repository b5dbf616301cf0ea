"""Attacks by a stranger, a tenant, a web page or a failing part on a router, on rings of real processes with
two honest tenants that stream all the time.

    python -m loadtest.hostile                                        # all attacks: a quarter of an hour
    python -m loadtest.hostile --attack head-long --attack grpc-no-key
    python -m loadtest.hostile --background 20 --rounds 3             # beside other work
    python -m loadtest.hostile --tree ../before --expect-broken       # the commit before, in another checkout

Attacks are bounded in count and time and go to loopback only, from addresses of their own (127.0.0.2 and on).
Each has a ring of its own: a router with keys, tenants and limits before a simulated prefill and decode
worker, from the source tree ``--tree``. After a calm phase comes the attack, then recovery. A row gives the
router's memory, its longest silence, the latencies of honest tenants, the attacker's answers, and whether the
attack reached its aim. Latencies are judged by their ratio to the calm before, which has the same other work
beside it, as 99th percentiles over all rounds. Fails (exit status 1) if an attack does or a bound does not
hold; with ``--expect-broken`` if an attack that shows a finding does not reach its aim.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from loadtest.background import busy
from loadtest.conditions import conditions
from loadtest.hostile import campaign, table, verdict
from loadtest.hostile.catalogue import ATTACKS
from loadtest.hostile.trials import TRIALS
from loadtest.hostile.verdict import Row
from loadtest.hostile.vocabulary import Found
from loadtest.trees import HERE, tree


def tried(name: str, tree: Path, tmp: Path, rounds: int = 1, beside: bool = False) -> Row:
    """Run one attack, ``rounds`` times, or one trial. A ring that does not start counts as one that did not
    hold."""
    attack, trial = ATTACKS.get(name), TRIALS.get(name)
    try:
        if attack is not None:
            return campaign.run(attack, tree, tmp, rounds=rounds, beside=beside)
        assert trial is not None
        return campaign.attempt(trial, tree, tmp)
    except (RuntimeError, TimeoutError) as error:
        what = attack or trial
        assert what is not None
        return Row(
            name=name,
            finding=what.finding,
            aim=what.aim,
            worked=False,
            broken=[f"could not be tried: {str(error)[-300:]}"],
            found=Found(),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*ATTACKS, *TRIALS]
    parser.add_argument("--attack", action="append", choices=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--tree", type=tree, default=HERE, help="source tree of the processes under attack")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--expect-broken", action="store_true", help="each finding is to be shown to work")
    parser.add_argument(
        "--background", type=int, default=0, metavar="N", help="run beside so many busy processes"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each attack is run; times are pooled"
    )
    chosen = parser.parse_args(arguments)
    console = Console(width=200)
    lines = [
        *conditions("loadtest.hostile"),
        f"load average before: {os.getloadavg()[0]:.1f}",
        f"tree: {chosen.tree}",
        f"busy processes beside it: {chosen.background}; rounds: {chosen.rounds}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    began = time.monotonic()
    rows: list[Row] = []
    with busy(chosen.background):
        for name in chosen.attack or every:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(tried(name, chosen.tree, Path(scratch), chosen.rounds, chosen.background > 0))
            console.print(table.line(rows[-1]), soft_wrap=True, markup=False)
    console.print(table.of(rows))
    told = verdict.verdict(rows, _shown(), expect_broken=chosen.expect_broken)
    console.print(f"VERDICT: {'ok' if told else 'FAILED'} ({time.monotonic() - began:.0f} s)")
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode({"conditions": lines, "rows": rows})))
    return int(not told)


def _shown() -> Mapping[str, bool]:
    return {name: attack.shown for name, attack in ATTACKS.items()} | {
        name: trial.shown for name, trial in TRIALS.items()
    }


if __name__ == "__main__":
    sys.exit(main())
