"""What ``baton up`` shows: bars on a terminal, plain lines in a file."""

from __future__ import annotations

import logging
import sys
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from baton.process import ready

_STAGES = {"load": "loading"}


class View(Protocol):
    """Told of everything that happens to the children."""

    def starting(self, name: str) -> None:
        """A child process was started."""

    def progress(self, name: str, progress: ready.Progress) -> None:
        """A child says how far it is."""

    def ready(self, name: str, address: str, seconds: float) -> None:
        """A child is ready, so many seconds after it was started."""

    def log(self, name: str, level: int, line: str) -> None:
        """A child wrote a line to its log."""

    def say(self, text: str) -> None:
        """A line of our own."""

    def warn(self, text: str) -> None:
        """A line of our own that must not be missed."""


class _Logs:
    """Children's logs, on standard error with the child's name before each line."""

    def __init__(self, log_level: int) -> None:
        self._log_level = log_level

    def log(self, name: str, level: int, line: str) -> None:
        if level >= self._log_level:
            print(f"{name}: {line}", file=sys.stderr, flush=True)


class PlainView(_Logs):
    """One line per event, and one per quarter of a load: for files, pipes and CI."""

    def __init__(self, log_level: int = logging.WARNING) -> None:
        super().__init__(log_level)
        self._told: dict[str, int] = {}

    def starting(self, name: str) -> None:
        self._told.pop(name, None)
        self.say(f"{name}: starting")

    def progress(self, name: str, progress: ready.Progress) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        if quarter > self._told.get(name, -1):
            self._told[name] = quarter
            self.say(f"{name}: {_STAGES.get(progress.stage, progress.stage)}, {25 * quarter} %")

    def ready(self, name: str, address: str, seconds: float) -> None:
        self.say(f"{name}: ready on {address} after {seconds:.1f} s")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class TerminalView(_Logs):
    """A bar per child while it starts. Use it as a context manager, which gives the terminal back."""

    def __init__(self, log_level: int = logging.WARNING) -> None:
        super().__init__(log_level)
        self._console = Console(highlight=False)
        self._bars = self._new_bars()
        self._tasks: dict[str, TaskID] = {}

    def _new_bars(self) -> Progress:
        return Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.fields[child]:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self._console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Leave the bars as they are; what comes later is shown as lines."""
        self._bars.stop()

    def starting(self, name: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("starting", child=name, total=None)

    def progress(self, name: str, progress: ready.Progress) -> None:
        stage = _STAGES.get(progress.stage, progress.stage)
        self._bars.update(
            self._tasks[name], description=stage, completed=progress.done, total=progress.total or None
        )

    def ready(self, name: str, address: str, seconds: float) -> None:
        text = f"ready on {address} after {seconds:.1f} s"
        if self._bars.live.is_started:
            self._bars.update(self._tasks[name], description=text, completed=1, total=1)
        else:
            self.say(f"{name}: {text}")

    def log(self, name: str, level: int, line: str) -> None:
        if level >= self._log_level:
            self._console.print(f"[yellow]{escape(name)}:[/] {escape(line)}", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(f"[bold red]{escape(text)}[/]", soft_wrap=True)
