"""An endless task that meets an error which it does not expect is logged, counted and goes on; all that are
started in the services."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.greeting.cluster_key import ClusterKeys
from baton.process.options import ConfigError
from baton.roles.prefill_links import DecodeLinks
from baton.roles.prefill_peers import Peer
from baton.router.discovery.endpoint import Endpoint
from baton.router.dispatch.ring import WorkerRing
from baton.router.fleet.members import Members
from baton.router.fleet.worker_client import Watcher, WorkerClient
from baton.router.main import _keep_beating
from baton.router.processes.gc import collect
from baton.router.processes.slot import ProcessSlot
from baton.router.security.keys import KeyFile, entry_line, new_key
from baton.router.shared.limits import Limits
from baton.router.ui.history import History
from baton.telemetry import supervision
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.supervision import Supervision
from baton.telemetry.tasks import TaskMetrics
from baton.transport.data_listener import DataListener
from tests.support.local_worker import LocalWorker, local_ring, until
from tests.support.planner_world import world


class Watched:
    """A supervision, and what it has counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tasks = Supervision(TaskMetrics(self.registry))

    def failures(self, task: str) -> float:
        return self.registry.get_sample_value("baton_task_failures_total", {"task": task}) or 0.0


class Failing:
    """In place of a function: raises the first times that it is called."""

    def __init__(self, times: int = 2, then: Callable[..., object] = lambda *_: None) -> None:
        self.calls = 0
        self._times = times
        self._then = then

    def __call__(self, *about: object, **more: object) -> object:
        self.calls += 1
        if self.calls <= self._times:
            raise RuntimeError("nobody expects this")
        return self._then(*about, **more)

    @property
    def went_on(self) -> bool:
        return self.calls > self._times + 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    return Watched()


# --- the supervision itself


async def test_an_error_is_logged_and_counted_and_the_task_goes_on(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(2)

    async def run() -> None:
        while True:
            failing()
            await asyncio.sleep(0.01)

    task = watched.tasks.start("clock", run, of="one")
    await until(lambda: failing.went_on)
    assert watched.failures("clock") == 2
    told = [each for each in caplog.records if each.name == "baton.telemetry.supervision"]
    assert [each.message for each in told] == ["clock one met an error that it does not expect"] * 2
    assert "nobody expects this" in caplog.text
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and watched.failures("clock") == 2


async def test_a_task_that_has_done_its_work_is_over(watched: Watched) -> None:
    async def run() -> None:
        pass

    await watched.tasks.keep("errand", run)
    assert watched.failures("errand") == 0


async def test_a_cancellation_of_something_else_ends_no_task(watched: Watched) -> None:
    calls = 0

    async def run() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost
        await asyncio.Event().wait()

    task = watched.tasks.start("waiter", run)
    await until(lambda: calls == 2)
    assert watched.failures("waiter") == 1 and not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_pauses_grow_and_begin_anew(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal clock
        pauses.append(seconds)
        clock += seconds

    lasts = [0.0] * 8 + [60.0, 0.0]

    async def run() -> None:
        nonlocal clock
        if not lasts:
            return
        clock += lasts.pop(0)
        raise RuntimeError

    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.1)
    loop = SimpleNamespace(time=lambda: clock)
    monkeypatch.setattr(
        supervision,
        "asyncio",
        SimpleNamespace(get_running_loop=lambda: loop, sleep=sleep, CancelledError=asyncio.CancelledError),
    )
    await watched.tasks.keep("clock", run)
    full = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 0.1, 0.2]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, full, strict=True))


async def test_where_going_on_is_worse_the_task_ends_with_what_it_is_given(watched: Watched) -> None:
    ended = 0

    def end() -> None:
        nonlocal ended
        ended += 1

    await watched.tasks.keep("timers", cast(Callable[[], Awaitable[None]], Failing(9)), on_failure=end)
    assert ended == 1 and watched.failures("timers") == 1


# --- each of those that the services start


async def test_the_ring_s_timers_go_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = WorkerRing([], "fake", ClusterKeys(b"key"), tasks=watched.tasks)
    failing = Failing()
    monkeypatch.setattr(ring, "_tick", failing)
    ring.start()
    await until(lambda: failing.went_on)
    assert watched.failures("timers") == 2
    await ring.close()


async def test_discovery_goes_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = WorkerRing([], "fake", ClusterKeys(b"key"), tasks=watched.tasks)
    failing = Failing(2, lambda *_: asyncio.Event().wait())
    monkeypatch.setattr(ring.fleet.discovery, "run", failing)
    ring.start()
    await until(lambda: failing.calls == 3)
    assert watched.failures("discovery") == 2
    await ring.close()


async def test_a_worker_s_client_goes_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(2, lambda *_: asyncio.Event().wait())

    worker = WorkerClient("10.0.0.1:1", "r", cast(Watcher, None))
    monkeypatch.setattr(worker, "run", failing)
    members = Members(lambda address: worker, tasks=watched.tasks)
    members.set([Endpoint(address="10.0.0.1:1")])
    members.start()
    await until(lambda: failing.calls == 3)
    assert watched.failures("worker") == 2
    await members.close()


async def test_the_live_page_goes_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(RouterMetrics(CollectorRegistry()), [], AdmissionMetrics(CollectorRegistry()))
    failing = Failing()
    monkeypatch.setattr("baton.router.ui.history.EVERY_S", 0.01)
    monkeypatch.setattr(history, "tick", failing)
    task = watched.tasks.start("live page", history.run)
    await until(lambda: failing.went_on)
    assert watched.failures("live page") == 2
    task.cancel()


async def test_the_keys_go_on(watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"keys:\n{entry_line(new_key(), 'ci', 'acme')}")
    keys = KeyFile(str(path), Limits())
    failing = Failing()
    monkeypatch.setattr("baton.router.security.keys.RELOAD_S", 0.01)
    monkeypatch.setattr(keys, "follow", failing)
    task = watched.tasks.start("keys", keys.run)
    await until(lambda: failing.went_on)
    assert watched.failures("keys") == 2
    task.cancel()


async def test_the_collector_goes_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(2, lambda *_: False)
    for name in ("freeze", "set_threshold", "collect"):
        monkeypatch.setattr(f"baton.router.processes.gc.gc.{name}", lambda *_: None)
    monkeypatch.setattr("baton.router.processes.gc.LOOK_S", 0.01)
    monkeypatch.setattr("baton.router.processes.gc.IDLE_S", 0.0)
    task = watched.tasks.start("garbage", lambda: collect(cast(Callable[[], bool], failing)))
    await until(lambda: failing.went_on)
    assert watched.failures("garbage") == 2
    task.cancel()


async def test_the_beat_of_one_process_among_several_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing()
    monkeypatch.setattr("baton.router.main.BEAT_S", 0.01)
    place = cast(ProcessSlot, SimpleNamespace(beat=failing))
    task = watched.tasks.start("process beat", lambda: _keep_beating(place))
    await until(lambda: failing.went_on)
    assert watched.failures("process beat") == 2
    task.cancel()


async def test_a_link_that_is_kept_goes_on(watched: Watched) -> None:
    calls = 0

    async def dial(peer: Peer, lost: object) -> None:
        nonlocal calls
        calls += 1
        raise ConfigError("x", "nobody expects this")

    links = DecodeLinks(
        dial,  # type: ignore[arg-type]
        lambda _: None,
        lambda _: None,
        lambda _: False,
        watched.tasks,
    )
    links.know("r", [Peer("127.0.0.1:1", "i")])
    await until(lambda: calls >= 3)
    assert watched.failures("link") >= 2
    await links.close()


async def test_a_worker_s_request_timers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    worker = LocalWorker("both")
    async with local_ring([worker]):
        failing = Failing()
        monkeypatch.setattr(worker.service, "_end_overdue", failing)
        await until(lambda: failing.went_on)
        assert failures_of(worker, "request timers") == 2 and not worker.crashed.is_set()


@pytest.mark.parametrize(("role", "method"), [("prefill", "_links"), ("decode", "_give_up_stalled")])
async def test_an_error_in_a_handoff_s_timers_ends_the_worker(
    role: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    worker = LocalWorker("both")
    async with local_ring([worker]):
        failing = Failing(9)
        if method == "_links":
            monkeypatch.setattr(worker.prefill.links, "tick", failing)
        else:
            monkeypatch.setattr(worker.decode, method, failing)
        async with asyncio.timeout(60):
            await worker.crashed.wait()
        await asyncio.sleep(0.3)
        assert failing.calls == 1 and failures_of(worker, f"{role} timers") == 1


def failures_of(worker: LocalWorker, task: str) -> float:
    return worker.registry.get_sample_value("baton_task_failures_total", {"task": task}) or 0.0


async def test_the_planner_goes_on(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here:
        failing = Failing(2, lambda *_: asyncio.sleep(0))
        monkeypatch.setattr(here.service, "decide", failing)
        here.service.hear(here.discovery.known)
        task = watched.tasks.start("planning", lambda: here.service.run(0.01))
        await until(lambda: failing.went_on)
        assert watched.failures("planning") == 2
        task.cancel()


@pytest.fixture
def door() -> Iterator[list[socket.socket]]:
    admitted: list[socket.socket] = []
    yield admitted
    for sock in admitted:
        sock.close()


async def test_data_connections_are_accepted_after_an_error(
    door: list[socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    token = b"t" * 32
    opened = DataListener(b"magic", {token}, lambda _, stream: door.append(stream.sock))
    accept = asyncio.get_running_loop().sock_accept
    failing = Failing(2, accept)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", failing)
    address = opened.open("127.0.0.1", 0)
    port = int(address.rpartition(":")[2])
    await until(lambda: failing.calls == 3)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"magic" + token)
    await until(lambda: door)
    assert caplog.text.count("data connections met an error") == 2
    writer.close()
    await opened.close()
