"""``baton models``: the architectures that are served."""

from __future__ import annotations

import json
from typing import Annotated

import typer

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def models(as_json: JSON = False) -> None:
    """List the architectures that Baton serves, example checkpoints, and those that it refuses, with the
    reason.

    An architecture is what a checkpoint's config.json names first in `architectures`. Each one is compared
    with transformers token by token: on one worker, split over ranks, and through a ring of prefill and
    decode workers. docs/models.md has the tests.
    """
    from baton.models.registry import FAMILIES, UNSERVED

    if as_json:
        served = {name: {"checkpoints": list(family.checkpoints)} for name, family in FAMILIES.items()}
        print(json.dumps({"served": served, "refused": dict(UNSERVED)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("architecture", title=f"{len(FAMILIES)} architectures")
    table.add_column("for example", overflow="fold")
    for name, family in sorted(FAMILIES.items()):
        table.add_row(name, "\n".join(family.checkpoints) or "-")
    console = Console()
    console.print(table)
    for name, reason in UNSERVED.items():
        console.print(f"{name}: {reason}", highlight=False, soft_wrap=True)
