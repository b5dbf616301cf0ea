"""``baton models``: the architectures that are served, and what a checkpoint takes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from baton.cli.derived import Given, OptionsOf, takes
from baton.process.fields import to_argv
from baton.process.options import ConfigError, ModelError, UserError, check_range, parse_size
from baton.worker.config import WorkerConfig

_CHECK = "Checkpoint"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Check = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Say what this checkpoint is, what it takes and whether this machine holds it, without loading "
        "it: a directory, or a hub id of which the files are here.",
        rich_help_panel=_CHECK,
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of each GPU that is meant instead of this machine's, such as 80GiB.",
        rich_help_panel=_CHECK,
    ),
]
Utilization = Annotated[
    float | None,
    typer.Option(help="The share of it that a worker uses. Default: 0.9.", rich_help_panel=_CHECK),
]
Length = Annotated[
    int | None,
    typer.Option(
        help="Tokens of the sequences that are counted. Default: the longest.", rich_help_panel=_CHECK
    ),
]


@takes(
    *("as_json", "check", "gpu_memory", "gpu_memory_utilization", "length"),
    OptionsOf(
        WorkerConfig,
        only=(
            *("dtype", "quantization", "device", "max_model_len", "block_size"),
            *("kv_cache_memory", "kv_cache_dtype"),
            *("tensor_parallel_size", "pipeline_parallel_size"),
        ),
    ),
)
def models(
    given: Given,
    as_json: Json = False,
    check: Check = None,
    gpu_memory: GpuMemory = None,
    gpu_memory_utilization: Utilization = None,
    length: Length = None,
) -> int:
    """List the architectures that Baton serves, example checkpoints, and those that it refuses, with the
    reason; or, with --check, say what one checkpoint takes.

    An architecture is what a checkpoint's config.json names first in `architectures`. Each one is compared
    with transformers token by token: on one worker, split over ranks, and through a ring of prefill and
    decode workers. docs/models.md has the tests.
    """
    own = {
        "gpu_memory": gpu_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "length": length,
    }
    worker = given.fields(WorkerConfig)
    if check is not None:
        size = None if gpu_memory is None else _size("gpu_memory", gpu_memory)
        return _check(
            WorkerConfig(role="both", model=check, **worker), as_json, size, gpu_memory_utilization, length
        )
    for option, value in own.items():
        if value is not None:
            raise ConfigError(option, "can only be given together with --check")
    for option in to_argv(WorkerConfig(role="both", **worker))[:1]:
        raise UserError(f"{option}: can only be given together with --check")
    _list(as_json)
    return 0


def _size(option: str, text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(option, str(error)) from None
    check_range(option, size, 1)
    return size


def _check(
    worker: WorkerConfig,
    as_json: bool,
    gpu_memory: int | None,
    fraction: float | None,
    length: int | None,
) -> int:
    """Print what was found. The exit status is 1 where the checkpoint cannot be served like this."""
    if fraction is not None and (gpu_memory is None or not 0 < fraction <= 1):
        raise ConfigError(
            "gpu_memory_utilization", f"must be above 0 and at most 1, and with --gpu-memory, not {fraction}"
        )
    from baton.cli import checkpoint
    from baton.worker.checkpoint import check_checkpoint

    try:
        checked = check_checkpoint(worker, gpu_memory, fraction, length)
    except (ModelError, ValueError) as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(checkpoint.as_json(checked), indent=2))
    else:
        print(*checkpoint.as_lines(checked), sep="\n")
    return 0 if checked.is_fine else 1


def _list(as_json: bool) -> None:
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
