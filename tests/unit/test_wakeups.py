"""gRPC events are not left behind by an event loop that is busy."""

from __future__ import annotations

import subprocess
import sys

from tests.support.busy_loop import MESSAGES, STREAMS


def test_a_turn_of_the_loop_takes_every_event_there_is() -> None:
    """As grpcio has it, each takes one once its socket is full: 5,500 turns for these messages."""
    argv = [sys.executable, "-m", "tests.support.busy_loop", "take_all"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert int(said.stdout) < STREAMS * MESSAGES / 3
