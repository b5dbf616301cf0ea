"""What ``baton up`` shows: the ring, drawn on a terminal; plain lines in a file."""

from __future__ import annotations

import logging
import sys
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from baton.cli.drawing import RingDrawing
from baton.process import ready

STAGES = {"load": "loading", "capture": "recording graphs"}
"""Stages of a start, as a person is told of them."""


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
    """One line per event, and one per quarter of a stage: for files, pipes and CI."""

    def __init__(self, log_level: int = logging.WARNING) -> None:
        super().__init__(log_level)
        self._told: dict[str, tuple[str, int]] = {}
        """The stage and the quarter of it that a child was last said to be in."""

    def starting(self, name: str) -> None:
        self._told.pop(name, None)
        self.say(f"{name}: starting")

    def progress(self, name: str, progress: ready.Progress) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        stage, told = self._told.get(name, ("", -1))
        if progress.stage != stage or quarter > told:
            self._told[name] = progress.stage, quarter
            self.say(f"{name}: {STAGES.get(progress.stage, progress.stage)}, {25 * quarter} %")

    def ready(self, name: str, address: str, seconds: float) -> None:
        self.say(f"{name}: ready on {address} after {seconds:.1f} s")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class TerminalView(_Logs):
    """The ring, drawn as it comes up. Use it as a context manager, which gives the terminal back."""

    def __init__(self, log_level: int = logging.WARNING, console: Console | None = None) -> None:
        super().__init__(log_level)
        self._console = console or Console(highlight=False)
        self._drawing = RingDrawing()
        self._live = Live(self._drawing, console=self._console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Leave the drawing as it is; what comes later is shown as lines."""
        self._live.stop()

    def starting(self, name: str) -> None:
        self._drawing.starting(name)

    def progress(self, name: str, progress: ready.Progress) -> None:
        stage = STAGES.get(progress.stage, progress.stage)
        self._drawing.progress(name, stage, progress.done, progress.total)

    def ready(self, name: str, address: str, seconds: float) -> None:
        self._drawing.ready(name, address, seconds)
        if not self._live.is_started:
            self.say(f"{name}: ready on {address} after {seconds:.1f} s")

    def log(self, name: str, level: int, line: str) -> None:
        if level >= self._log_level:
            self._console.print(f"[yellow]{escape(name)}:[/] {escape(line)}", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(f"[bold red]{escape(text)}[/]", soft_wrap=True)
