"""Fetches a model of the hub before a ring starts: once, with a bar on a terminal and lines elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from baton import hub
from baton.process.options import ModelError, StartError


def fetched(model: str, revision: str | None = None, *, weights: bool = True) -> str:
    """Where ``model`` is on this machine: the directory that a model of the hub is in then, others as they
    are named. Raises StartError when the hub does not give it."""
    if not hub.is_hub_id(model):
        if revision is not None:
            raise StartError(f"--revision: {model} is no model of the hub")
        return model
    console = Console(stderr=True)
    try:
        if console.is_terminal:
            with _bar(console, model) as bar:
                return str(hub.resolve_model(model, revision=revision, weights=weights, bar=bar))
        return _with_lines(model, revision, weights)
    except ModelError as error:
        raise StartError(str(error)) from error


def _with_lines(model: str, revision: str | None, weights: bool) -> str:
    started = time.monotonic()
    print(f"{model}: fetching from the hub", file=sys.stderr, flush=True)
    path = hub.resolve_model(model, revision=revision, weights=weights, bar=_Silent)
    seconds = time.monotonic() - started
    print(f"{model}: in {path} after {seconds:.1f} s", file=sys.stderr, flush=True)
    return str(path)


@contextmanager
def _bar(console: Console, model: str) -> Iterator[type[tqdm]]:
    """A class of bars for the hub's client, which sum up in one on the terminal: bytes that have come."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(model, total=None)

        class Shown(_Silent):
            def display(self, *_: object, **__: object) -> None:
                if self.unit == "B" and self.total:
                    progress.update(task, completed=self.n, total=self.total)

        yield Shown


class _Silent(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar of the hub's client that writes nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "file": io.StringIO()})

    def display(self, *_: object, **__: object) -> None:
        """Called when the bar has moved."""
