"""Attacks by a stranger, a tenant, a web page or a failing part on a router, on rings of real processes with
two honest tenants that stream all the time.

    python -m loadtest.hostile                                        # all attacks: a quarter of an hour
    python -m loadtest.hostile --attack head-long --attack grpc-no-key
    python -m loadtest.hostile --tree ../before --expect-broken       # the commit before, in another checkout

Attacks are bounded in count and time and go to loopback only, from addresses of their own (127.0.0.2 and on).
Each has a ring of its own: a router with keys, tenants and limits before a simulated prefill and decode
worker, from the source tree ``--tree``. After a calm phase comes the attack, then recovery. A row gives the
router's memory, its longest silence, the latencies of honest tenants, the attacker's answers, and whether the
attack reached its aim. Fails (exit status 1) if an attack does or a bound does not hold; with
``--expect-broken`` if an attack that shows a finding does not reach its aim.
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

from loadtest.conditions import conditions
from loadtest.hostile import campaign, table, verdict
from loadtest.hostile.catalogue import ATTACKS
from loadtest.hostile.trials import TRIALS
from loadtest.hostile.verdict import Row
from loadtest.hostile.vocabulary import Found
from loadtest.trees import HERE, tree


def tried(name: str, tree: Path, tmp: Path) -> Row:
    """Run one attack or trial. A ring that does not start counts as one that did not hold."""
    attack, trial = ATTACKS.get(name), TRIALS.get(name)
    try:
        if attack is not None:
            return campaign.run(attack, tree, tmp)
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
    chosen = parser.parse_args(arguments)
    console = Console(width=200)
    lines = [
        *conditions("loadtest.hostile"),
        f"load average before: {os.getloadavg()[0]:.1f}",
        f"tree: {chosen.tree}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    began = time.monotonic()
    rows: list[Row] = []
    for name in chosen.attack or every:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(tried(name, chosen.tree, Path(scratch)))
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
