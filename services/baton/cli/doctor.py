"""``baton doctor``: looks at this machine, shows what was found, and says so by its exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.derived import Given, OptionsOf, takes
from baton.core.role import ROLES
from baton.doctor.examination import Examination, examine
from baton.doctor.finding import Judgement
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted
from baton.process.fields import options_of
from baton.worker.config import WorkerConfig

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {Judgement.OK: "green", Judgement.NOTE: "yellow", Judgement.LACK: "bold red"}


@takes(
    OptionsOf(Wanted, only=("role",)),
    OptionsOf(WorkerConfig, only=("model", "device", "connector", "require_rdma")),
    OptionsOf(Wanted),
)
def doctor(
    given: Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Say what this machine or pod has and lacks for Baton, and what to do about it.

    Each line has a verdict: ok, note (worth knowing), or lack (a service cannot start, or cannot do what it
    was asked for). The exit status is 1 if there is a lack.
    """
    role = given.values["role"]
    examined = [one.field for one in options_of(Wanted)]  # host, ...: where to look, not a worker's own
    worker = WorkerConfig(role=role if role in ROLES else "both", **given.fields(WorkerConfig, *examined))
    return run_doctor(Wanted(worker=worker, **given.fields(Wanted)), as_json=as_json)


def run_doctor(wanted: Wanted, *, as_json: bool) -> int:
    """Examine this machine, print the report, and return the exit status."""
    found = examine(Machine(), wanted)
    if as_json:
        import orjson

        print(orjson.dumps(found.document(), option=orjson.OPT_INDENT_2).decode())
    else:
        show(found)
    return 1 if found.count(Judgement.LACK) else 0


def show(found: Examination) -> None:
    """Print the report for a person."""
    from rich.console import Console

    from baton.cli.plain_output import show as show_plainly

    show_plainly(_table(found), Console(highlight=False))
    lacks, notes = found.count(Judgement.LACK), found.count(Judgement.NOTE)
    print(f"\nfor {found.wanted.role}: {lacks} lacking, {notes} to note")


def _table(found: Examination) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for area, findings in found.findings.items():
        for index, one in enumerate(findings):
            says = Text(one.says)
            if one.do:
                says.append(f"\n→ {one.do}", style="cyan")
            verdict = Text(one.verdict, style=_COLOURS[one.verdict])
            table.add_row(Text("" if index else area, style="bold"), verdict, Text(one.name), says)
    return table
