"""``baton top``: a ring at a glance, on a terminal until somebody leaves, or as one frame of text."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import arguments as arg
from baton.cli.ring_figures import WorkerRates, ask_for_figures, rates_between
from baton.process.options import UserError, check_range

if TYPE_CHECKING:
    from rich.console import Console, Group

_LEAST_INTERVAL_S = 0.2
_QUIT = (b"q", b"Q", b"")
"""What is read when somebody leaves: a key, or the end of input."""


def top(
    router: Annotated[
        str, typer.Option("--router", "--url", help="Address of the ring's HTTP API.")
    ] = "http://127.0.0.1:8000",
    api_key: arg.ApiKey = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.")] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one frame, after two looks, and end, as where the output is no terminal."
        ),
    ] = False,
) -> None:
    """Show a running ring: its requests, latencies, queue and workers, until q or Ctrl-C.

    Where the ring has keys, an operator's is needed.
    """
    check_range("interval", interval, _LEAST_INTERVAL_S)

    from rich.console import Console

    from baton.cli.plain_output import WIDTH, show

    console = Console(highlight=False)
    looks = _Looks(router, api_key)
    if once or not console.is_terminal or not sys.stdin.isatty():
        time.sleep(interval)
        looks.again()
        show(looks.frame(console.width if console.is_terminal else WIDTH), console)
    else:
        _watch(looks, interval, console)


class _Looks:
    """Looks at a ring, one after the other: the rates of its workers are those between two."""

    def __init__(self, router: str, api_key: str | None) -> None:
        """Takes the first look. Raises UserError if there is nothing to see."""
        self._router, self._api_key = router, api_key
        self._figures, self._at = ask_for_figures(router, api_key), time.monotonic()
        self._rates: dict[str, WorkerRates] = {}

    def again(self) -> None:
        """Take another look. Raises UserError."""
        figures, now = ask_for_figures(self._router, self._api_key), time.monotonic()
        self._rates = rates_between(self._figures, figures, now - self._at)
        self._figures, self._at = figures, now

    def frame(self, columns: int, lines: int | None = None, failure: str = "") -> Group:
        """What was seen last. ``failure``: why it is no longer new."""
        from baton.cli.top_frame import frame

        return frame(self._figures, self._router, self._rates, columns=columns, lines=lines, failure=failure)


def _watch(looks: _Looks, interval_s: float, console: Console) -> None:
    """Show frame after frame. A look that fails is told in the frame; the next may find the ring again."""
    from rich.live import Live

    failure = ""
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            columns, lines = console.size
            live.update(looks.frame(columns, lines, failure), refresh=True)
            if _leaves_within(interval_s):
                return
            try:
                looks.again()
                failure = ""
            except UserError as error:
                failure = str(error)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Have keys come one by one and unseen, and the terminal as it was at the end."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _leaves_within(seconds: float) -> bool:
    """Whether somebody leaves within so many seconds: by a key, or with the terminal itself. Returns at any
    key."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in _QUIT
