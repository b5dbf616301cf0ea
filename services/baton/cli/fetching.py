"""Fetches a model of the hub before a ring starts: once, with a bar on a terminal and lines elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from baton import hub
from baton.cli.derived import Given
from baton.process.options import ConfigError, ModelError, StartError

LINES_EVERY_S = 10.0

Watcher = Callable[[int, int], None]
"""Told how many bytes of how many have come."""


def with_files(given: Given, model: str, revision: str | None = None) -> Given:
    """``given`` with the directory that holds ``model`` on this machine, and a name of its own for a model of
    the hub, which is fetched. Raises StartError, one line, when the hub does not give it."""
    if not hub.is_hub_id(model):
        if revision is not None:
            raise ConfigError("revision", f"{model} is no model of the hub, and has none")
        return Given({**given.values, "model": model})
    path = _fetched(model, revision, weights=given.values["load_format"] != "dummy")
    names = given.values["served_model_name"] or [model]
    return Given({**given.values, "model": path, "served_model_name": names})


def _fetched(model: str, revision: str | None, *, weights: bool) -> str:
    console = Console(stderr=True)

    def fetch(watch: Watcher) -> str:
        try:
            bar = _watched_bar(watch)
            return str(hub.resolve_model(model, revision=revision, weights=weights, bar=bar))
        except ModelError as error:
            raise StartError(str(error)) from error

    return _with_bar(console, model, fetch) if console.is_terminal else _with_lines(model, fetch)


def _with_bar(console: Console, model: str, fetch: Callable[[Watcher], str]) -> str:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(model, total=None)
        return fetch(lambda done, total: progress.update(task, completed=done, total=total))


def _with_lines(model: str, fetch: Callable[[Watcher], str]) -> str:
    started = told = time.monotonic()

    def watch(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= LINES_EVERY_S:
            told = time.monotonic()
            _say(f"{model}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    _say(f"{model}: fetching from the hub")
    path = fetch(watch)
    _say(f"{model}: is in {path}, after {time.monotonic() - started:.1f} s")
    return path


def _watched_bar(watch: Watcher) -> type:
    """A class of bars for the hub's client that writes nothing, and tells of the bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    most = 0  # one bar has the bytes received, another those on the disk: told are those of the first

    class Watched(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            silent = {**kwargs, "file": io.StringIO(), "disable": False}
            super().__init__(*args, **silent)  # type: ignore[no-untyped-call]

        def display(self, *_: object, **__: object) -> None:
            """Called when the bar has moved, and at its end."""
            nonlocal most
            if self.unit == "B" and self.total and self.n > most:
                most = int(self.n)
                watch(most, int(self.total))

    return Watched


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
