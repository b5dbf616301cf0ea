"""``baton up`` as a process: what it prints, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FAKE_UP = str(Path(__file__).parents[1] / "support" / "fake_up.py")


class Up:
    """A running fake ring, and what it has printed so far."""

    def __init__(self, *actions: str) -> None:
        port = str(random.SystemRandom().randrange(12000, 20000))
        self.process = subprocess.Popen(
            [sys.executable, FAKE_UP, port, *actions],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""

    def read_until(self, text: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def wait(self) -> int:
        rest, _ = self.process.communicate(timeout=120)
        self.output += rest
        return self.process.returncode


@pytest.fixture
def started() -> Iterator[list[Up]]:
    rings: list[Up] = []
    yield rings
    for ring in rings:
        ring.process.kill()
        ring.process.communicate()


def start(started: list[Up], *actions: str) -> Up:
    ring = Up(*actions)
    started.append(ring)
    return ring


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_it_shows_the_start_and_the_answer_and_ctrl_c_ends_it(started: list[Up]) -> None:
    ring = start(started, "progress", "ready", "sleep")
    ring.read_until("serving")
    children = ring.children()
    assert len(children) == 2
    ring.process.send_signal(signal.SIGINT)
    assert ring.wait() == 0
    assert_gone(children)
    shown = re.sub(r"\d+\.\d+ s", "N s", ring.output)
    assert "worker: loading, 50 %\nworker: ready on 127.0.0.1:1 after N s\n" in shown
    assert "> What?\nThe answer.\n\n(2 tokens; the first came N s after the start)\n" in shown
    assert "curl -N http://127.0.0.1:" in shown


def test_sigterm_ends_it_during_the_start(started: list[Up]) -> None:
    ring = start(started, "sleep")
    ring.read_until("worker: starting")
    children = ring.children()
    ring.process.terminate()
    assert ring.wait() == 130
    assert_gone(children)


def test_no_child_outlives_a_killed_parent(started: list[Up]) -> None:
    ring = start(started, "stubborn", "ready", "sleep")
    ring.read_until("serving")
    children = ring.children()
    ring.process.kill()
    assert_gone(children)


def test_a_killed_worker_comes_back(started: list[Up]) -> None:
    ring = start(started, "ready", "sleep")
    ring.read_until("serving")
    worker = next(child for child in ring.children() if "serve" not in child.cmdline()[-1])
    worker.kill()
    ring.read_until("worker died (killed by SIGKILL); starting it again")
    ring.read_until("worker: ready")
    ring.process.terminate()
    assert ring.wait() == 0


def test_a_start_that_fails_says_why_and_stops_the_rest(started: list[Up]) -> None:
    ring = start(started, "error:models/x: no config.json", "exit:1")
    began = time.monotonic()
    assert ring.wait() == 1
    assert ring.output.endswith("error: worker did not start: models/x: no config.json\n")
    assert "Traceback" not in ring.output
    assert time.monotonic() - began < 15


def test_a_terminal_shows_the_ring_and_the_reason_of_a_start_that_fails() -> None:
    """The terminal is a pseudo terminal, as a person's is."""
    leader, follower = pty.openpty()
    port = str(random.SystemRandom().randrange(12000, 20000))
    command = [sys.executable, FAKE_UP, port, "progress", "error:models/x: no config.json", "exit:1"]
    process = subprocess.Popen(
        command, stdout=follower, stderr=follower, env={**os.environ, "COLUMNS": "100"}
    )
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a pseudo terminal reads on Linux
        while piece := os.read(leader, 65536):
            shown += piece
    os.close(leader)
    assert process.wait(timeout=120) == 1
    assert "client ══► ".encode() in shown
    assert b"error: worker did not start: models/x: no config.json" in shown
