"""``baton top`` beside a ring: one frame in a file, and frames on a terminal that is given back."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deep import all_deep_but
from tests.support.ring import Ring, running, running_routers, simulated

pytestmark = pytest.mark.beside

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""What switches a terminal to its other screen, and back."""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    tmp = tmp_path_factory.mktemp("ring")
    workers = [simulated(tmp, role, role) for role in ("prefill", "decode")]
    with running(workers), running_routers(tmp, "demo", {"router": workers}) as rings:
        yield rings["router"]


def ask(ring: Ring) -> None:
    body = json.dumps({"model": "demo", "prompt": "a prompt", "max_tokens": 8, "ignore_eos": True})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{ring.url}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8


def top(ring: Ring, *more: str) -> list[str]:
    return [sys.executable, "-m", "baton", "top", "--router", ring.url, *more]


def test_one_frame(ring: Ring) -> None:
    command = top(ring, "--interval", "0.5")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
        while asked.poll() is None:
            ask(ring)
        out, err = asked.communicate()
    assert asked.returncode == 0, err
    lines = out.splitlines()
    assert lines[0] == f"baton top  {ring.url}"
    assert [line.split()[0] for line in lines[-2:]] == ["prefill", "decode"]
    assert all(line.split()[2] == "ready" for line in lines[-2:])
    prompt, tokens = zip(*(line.split()[6:8] for line in lines[-2:]), strict=True)
    assert prompt[0] != "0" and tokens[1] != "0", lines


@pytest.mark.parametrize(("key", "status"), all_deep_but(1, [(b"q", 0), (b"\x03", 130)]))
def test_frames_until_somebody_leaves(ring: Ring, key: bytes, status: int, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        top(ring, "--interval", "0.2"),
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
        start_new_session=True,
        preexec_fn=as_on_a_terminal,
    )
    try:
        seen = read_until(ours, b"decode", 3)
        assert ENTER in seen
        os.write(ours, key)
        seen += read_until(ours, LEAVE, 1)
        assert process.wait(60) == status
        assert termios.tcgetattr(its) == before
        assert seen.rindex(LEAVE) > seen.rindex(ENTER)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


def as_on_a_terminal() -> None:
    """Make standard input the terminal of the session, as a login does. Tests that run in the background of a
    shell ignore SIGINT, and so would what they start."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(terminal: int, what: bytes, times: int) -> bytes:
    """What is written to a terminal up to so many occurrences."""
    seen, deadline = b"", time.monotonic() + 120
    while seen.count(what) < times:
        assert time.monotonic() < deadline, seen
        ready, _, _ = select.select([terminal], [], [], 1.0)
        if ready:
            seen += os.read(terminal, 65536)
    return seen
