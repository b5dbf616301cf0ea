"""gRPC events are not left behind by an event loop that is busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from baton.net import grpc_wakeups as wakeups
from baton.router import main as router
from baton.worker import main as worker
from tests.support.busy_loop import MESSAGES, STREAMS


def test_a_turn_of_the_loop_takes_every_event_there_is() -> None:
    """As grpcio has it, each takes one once its socket is full: 5,500 turns for these messages."""
    argv = [sys.executable, "-m", "tests.support.busy_loop", "take_all"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
    assert int(said.stdout) < STREAMS * MESSAGES / 3


class _CalledError(Exception):
    pass


@pytest.mark.parametrize(
    "start",
    [lambda: router._serve(None, [], None), lambda: worker.WorkerServer._start(None, None)],  # type: ignore[arg-type]
    ids=["router", "worker"],
)
async def test_a_service_sees_to_it_before_anything_of_grpc_is_set_up(
    start: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def called() -> None:
        raise _CalledError

    monkeypatch.setattr(wakeups, "take_all", called)
    with pytest.raises(_CalledError):
        await start()
