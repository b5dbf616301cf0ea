"""What ``baton up`` and ``baton serve`` show while a ring comes up: a drawing, or lines."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from baton.cli.console import PlainView, TerminalView, View
from baton.cli.drawing import RingDrawing
from baton.process.ready import Progress


def come_up(view: View | RingDrawing, names: tuple[str, ...]) -> None:
    for name in names:
        view.starting(name)


def shown(drawing: RingDrawing) -> list[str]:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as capture:
        console.print(drawing)
    spinners = {ord(sign): "*" for sign in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"}
    return [" ".join(line.split()).translate(spinners) for line in capture.get().splitlines()]


def test_a_ring_is_drawn_with_what_each_process_is_at() -> None:
    drawing = RingDrawing()
    come_up(drawing, ("prefill-0", "prefill-1", "decode", "router"))
    assert shown(drawing) == [
        "client ══► router * starting",
        "├─► prefill-0 * starting",
        "├─► prefill-1 * starting",
        "│ ║ KV blocks",
        "│ ▼",
        "└─► decode * starting",
    ]
    drawing.progress("prefill-0", "loading", 1, 2)
    drawing.ready("router", "127.0.0.1:8000", 3.21)
    drawing.progress("decode", "recording graphs", 12, 12)
    assert shown(drawing) == [
        "client ══► router ✓ ready on 127.0.0.1:8000 after 3.2 s",
        "├─► prefill-0 * loading 50 % ━━━━━━━━━━━━",
        "├─► prefill-1 * starting",
        "│ ║ KV blocks",
        "│ ▼",
        "└─► decode * recording graphs 100 % ━━━━━━━━━━━━━━━━━━━━━━━━",
    ]
    drawing.starting("prefill-0")  # once more, after its death
    assert shown(drawing)[1] == "├─► prefill-0 * starting"


def test_workers_that_do_both_hand_nothing_over() -> None:
    drawing = RingDrawing()
    come_up(drawing, ("both-0", "both-1", "router"))
    assert shown(drawing) == [
        "client ══► router * starting",
        "├─► both-0 * starting",
        "└─► both-1 * starting",
    ]


def test_a_terminal_has_the_drawing_and_lines_above_and_below_it() -> None:
    file = io.StringIO()
    view = TerminalView(console=Console(file=file, force_terminal=True, width=100, color_system=None))
    with view:
        come_up(view, ("both", "router"))
        view.progress("both", Progress("load", 3, 4))
        view.log("both", logging.WARNING, "something [odd]")
        view.ready("both", "127.0.0.1:1", 1.0)
    view.ready("router", "127.0.0.1:2", 2.0)
    text = file.getvalue()
    assert "both: something [odd]" in text
    before, after = text.rsplit("└─► both", 1)
    assert "✓ ready on 127.0.0.1:1 after 1.0 s" in after
    assert "router: ready on 127.0.0.1:2 after 2.0 s\n" in after
    assert "client ══► router" in before


def test_lines_tell_each_quarter_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    come_up(view, ("both",))
    for done in range(5):
        view.progress("both", Progress("load", done, 4))
        view.progress("both", Progress("load", done, 4))
    for done in (1, 5, 9):
        view.progress("both", Progress("capture", done, 10))
    assert capsys.readouterr().out.splitlines() == [
        "both: starting",
        *(f"both: loading, {share} %" for share in (0, 25, 50, 75, 100)),
        *(f"both: recording graphs, {share} %" for share in (0, 50, 75)),
    ]
