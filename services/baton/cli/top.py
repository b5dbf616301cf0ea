"""``baton top``: a ring at a glance, on a terminal until somebody leaves, or as one frame of text."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import arguments as arg
from baton.process.options import UserError, check_range

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_INTERVAL_S = 0.2
_QUIT = (b"q", b"Q", b"")
"""What is read when somebody leaves: a key, or the end of input."""


def top(
    router: Annotated[
        str, typer.Option("--router", "--url", help="Address of the ring's HTTP API.")
    ] = "http://127.0.0.1:8000",
    api_key: arg.ApiKey = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two frames.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end, as where the output is no terminal.")
    ] = False,
) -> None:
    """Show a running ring: its requests, latencies, queue and workers, until q or Ctrl-C.

    Where the ring has keys, an operator's is needed.
    """
    check_range("interval", interval, _LEAST_INTERVAL_S)

    from rich.console import Console

    console = Console(highlight=False)
    if once or not console.is_terminal or not sys.stdin.isatty():
        _print_frame(router, api_key, console)
    else:
        _watch(router, api_key, interval, console)


def _print_frame(router: str, api_key: str | None, console: Console) -> None:
    from baton.cli.plain_output import show
    from baton.cli.ring_figures import ask_for_figures
    from baton.cli.top_frame import frame

    show(frame(ask_for_figures(router, api_key), router), console)


def _watch(router: str, api_key: str | None, interval_s: float, console: Console) -> None:
    """Show frame after frame. The first must come; later ones may fail, which the frame says."""
    from rich.live import Live

    from baton.cli.ring_figures import ask_for_figures
    from baton.cli.top_frame import frame

    figures = ask_for_figures(router, api_key)
    failure = ""
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = console.size.height
            live.update(frame(figures, router, lines=lines, failure=failure), refresh=True)
            if _leaves_within(interval_s):
                return
            try:
                figures, failure = ask_for_figures(router, api_key), ""
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
