"""Starting, restarting, giving up and ending, with children that do as they are told."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.cli.child import ChildSpec
from baton.cli.supervisor import Patience, Supervisor
from baton.process import ready
from baton.process.options import StartError

SERVICE = str(Path(__file__).parents[1] / "support" / "fake_service.py")
QUICK = Patience(deaths=3, first_pause=0.01, max_pause=0.02, grace=0.5)


@dataclass
class Recorder:
    """A view that remembers."""

    events: list[str] = field(default_factory=list)
    logs: list[tuple[int, str]] = field(default_factory=list)
    ready_twice: asyncio.Event = field(default_factory=asyncio.Event)

    def starting(self, name: str) -> None:
        self.events.append("starting")

    def progress(self, name: str, progress: ready.Progress) -> None:
        self.events.append(f"progress {progress.done}/{progress.total}")

    def ready(self, name: str, address: str, seconds: float) -> None:
        if f"ready {address}" in self.events:
            self.ready_twice.set()
        self.events.append(f"ready {address}")

    def log(self, name: str, level: int, line: str) -> None:
        self.logs.append((level, line))

    def say(self, text: str) -> None:
        self.events.append(text)

    def warn(self, text: str) -> None:
        self.events.append(text)


def child(*actions: str, name: str = "worker") -> ChildSpec:
    return ChildSpec(name, (sys.executable, SERVICE, name, *actions))


async def test_children_become_ready_and_end() -> None:
    view = Recorder()
    supervisor = Supervisor(
        [child("sizes:large", "progress", "ready", "sleep"), child("ready", "sleep", name="b")], view, QUICK
    )
    messages = await supervisor.all_ready()
    assert messages == dict.fromkeys(("worker", "b"), ready.WorkerReady("127.0.0.1:1", "both"))
    assert {"worker: large", "progress 1/2", "ready 127.0.0.1:1"} <= set(view.events)
    await supervisor.stop()
    await supervisor.run()  # returns: nothing is left to watch


async def test_a_dead_child_is_started_again(tmp_path: Path) -> None:
    view = Recorder()
    supervisor = Supervisor([child("ready", f"once:{tmp_path / 'died'}:exit:3", "sleep")], view, QUICK)
    await supervisor.all_ready()
    async with asyncio.timeout(120):
        await view.ready_twice.wait()
    assert "worker died (exit status 3); starting it again" in view.events
    await supervisor.stop()


async def test_it_gives_up_by_name_on_a_child_that_keeps_dying() -> None:
    supervisor = Supervisor([child("ready", "error:out of luck", "exit:1")], Recorder(), QUICK)
    with pytest.raises(StartError, match=r"^worker died 3 times in 60 s, the last time: out of luck$"):
        await supervisor.run()
    await supervisor.stop()


@pytest.mark.parametrize(
    ("actions", "how"),
    [
        (["error:no such model", "exit:1"], "no such model"),
        (["raise"], "RuntimeError: a bug"),
        (["exit:7"], "exit status 7"),
        (["exit:0"], "exit status 0"),
    ],
)
async def test_a_child_that_never_was_ready_ends_the_start(actions: list[str], how: str) -> None:
    supervisor = Supervisor([child(*actions), child("ready", "sleep", name="b")], Recorder(), QUICK)
    with pytest.raises(StartError, match=f"^worker did not start: {how}$"):
        await supervisor.run()
    await supervisor.stop()


async def test_a_program_that_is_not_there_ends_the_start() -> None:
    supervisor = Supervisor([ChildSpec("worker", ("/no/such/program",))], Recorder(), QUICK)
    with pytest.raises(StartError, match=r"^worker did not start: .*No such file"):
        await supervisor.run()
    await supervisor.stop()


async def test_a_stubborn_child_is_killed_after_the_grace() -> None:
    supervisor = Supervisor([child("stubborn", "ready", "sleep")], Recorder(), QUICK)
    await supervisor.all_ready()
    started = time.monotonic()
    await supervisor.stop()
    assert 0.4 < time.monotonic() - started < 5


async def test_hurry_kills_at_once() -> None:
    patient = Patience(grace=30)
    supervisor = Supervisor([child("stubborn", "ready", "sleep")], Recorder(), patient)
    await supervisor.all_ready()
    asyncio.get_running_loop().call_later(0.1, supervisor.hurry)
    async with asyncio.timeout(60):
        await supervisor.stop()


async def test_a_stop_during_the_start_leaves_nothing() -> None:
    view = Recorder()
    supervisor = Supervisor([child("ready", "sleep")], view, QUICK)
    await asyncio.sleep(0)  # the task has begun, the process may or may not have
    async with asyncio.timeout(60):
        await supervisor.stop()
        await supervisor.run()


async def test_logs_keep_their_level_and_a_huge_line_hurts_nobody() -> None:
    view = Recorder()
    supervisor = Supervisor([child("long-line", "warn:look here", "ready", "sleep")], view, QUICK)
    await supervisor.all_ready()
    await supervisor.stop()
    assert [level for level, line in view.logs if "look here" in line] == [logging.WARNING]
