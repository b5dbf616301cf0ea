"""A router's event loop is watched: its turns are measured, and workers hear of it during long ones."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from baton.handoff.identity import sign_beat
from baton.net.channels import Dialer
from baton.net.heartbeat import Tempo
from baton.router.pulse.beats import ANSWER_S, CALLERS, Beats, new_nonce
from baton.router.pulse.turns import Turns
from baton.router.pulse.watch import LOG_THREAD, LOOK_S, LoopWatch
from baton.telemetry.turns import TurnMetrics
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from tests.support.certificates import Authority
from tests.support.greetings import greet_worker
from tests.support.local_worker import KEY, LocalWorker, until

NONCE = bytes(range(16))
QUICK = Tempo(heartbeat_s=0.2, busy_silence_s=0.8, idle_silence_s=0.8)


@pytest.fixture(autouse=True)
def _log_threads_end() -> Iterator[None]:
    """No test reads what the watch of the test before it had to log."""
    yield
    for thread in threading.enumerate():
        if thread.name == LOG_THREAD:
            thread.join(60)


def metrics() -> TurnMetrics:
    return TurnMetrics(CollectorRegistry())


# --- turns


async def test_a_long_turn_is_measured() -> None:
    registry = CollectorRegistry()
    turns = Turns(TurnMetrics(registry))
    turns.start()
    await asyncio.sleep(0.1)
    time.sleep(0.3)  # noqa: ASYNC251 - a turn that is long
    await asyncio.sleep(0.05)
    turns.stop()
    longest = registry.get_sample_value("baton_router_event_loop_longest_turn_seconds")
    assert longest is not None and 0.24 < longest < 1
    slow = [
        registry.get_sample_value("baton_router_event_loop_lag_seconds_bucket", {"le": bound})
        for bound in ("0.1", "+Inf")
    ]
    assert slow[0] is not None and slow[1] is not None and slow[1] - slow[0] >= 1
    assert 0.25 < turns.slow_at(turns.ticked_at) < 1


async def test_ticks_are_close_for_as_long_as_turns_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.pulse.turns.CLOSE_S", 0.6)
    turns = Turns(metrics())
    turns.start()

    async def ticks(seconds: float) -> int:
        seen = set()
        until_ = time.monotonic() + seconds
        while time.monotonic() < until_:
            seen.add(turns.ticked_at)
            await asyncio.sleep(0.002)
        return len(seen)

    await asyncio.sleep(0.7)
    assert await ticks(0.4) <= 12
    time.sleep(0.1)  # noqa: ASYNC251 - a turn that is long
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert await ticks(0.4) >= 20
    turns.stop()


async def test_a_turn_that_computes_is_measured_from_its_beginning() -> None:
    """Not from the next tick, which an idle loop has seldom."""
    told = metrics()
    turns = Turns(told, lambda: True)
    turns.start()
    await asyncio.sleep(0.3)
    ticked_at = turns.ticked_at
    await until(lambda: turns.ticked_at != ticked_at)
    began = time.thread_time()  # the next tick is due in 100 ms
    while time.thread_time() - began < 0.12:
        pass
    await asyncio.sleep(0.1)
    turns.stop()
    assert told.longest(time.monotonic()) >= 0.11


async def test_a_turn_that_waits_for_a_processor_is_none_of_the_loops_own() -> None:
    """Two threads of its processor, one of which has to wait for the other."""
    told = metrics()
    turns = Turns(told)
    cores = os.sched_getaffinity(0)
    busy = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", busy, str(min(cores))], stdout=subprocess.PIPE)  # noqa: ASYNC220
        for _ in range(8)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        turns.start()
        await asyncio.sleep(0.05)
        os.sched_setaffinity(0, {min(cores)})
        began = time.thread_time()
        while time.thread_time() - began < 0.05:  # of which it has every ninth moment
            pass
        await asyncio.sleep(0.1)
        turns.stop()
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.communicate()
    now = time.monotonic()
    assert told.longest(now) > 0.25
    assert told.longest_own(now) < told.longest(now) / 2


async def test_a_turn_that_waits_for_anything_else_is_the_loops_own() -> None:
    told = metrics()
    turns = Turns(told)
    turns.start()
    await asyncio.sleep(0.05)
    time.sleep(0.2)  # noqa: ASYNC251 - a turn that is long
    await asyncio.sleep(0.05)
    turns.stop()
    assert told.longest_own(time.monotonic()) > 0.15


def test_the_longest_turn_is_forgotten_after_a_minute() -> None:
    told = metrics()
    told.observe(3.0, 1000.0)
    for second in range(1001, 1060):
        told.observe(0.001, float(second))
        assert told.longest(float(second)) == 3.0
    for second in range(1060, 1080):
        told.observe(0.002, float(second))
    assert told.longest(1079.0) == 0.002
    assert told.longest(9999.0) == 0.0  # nothing ticks


# --- the watch


class Loop(Turns):
    """A loop that ticks when the test says so."""

    def __init__(self) -> None:
        super().__init__(metrics())

    def tick(self, now: float) -> None:
        late = now - self._due
        self._slow_s += late if late >= 0.1 else 0.0
        self.ticked_at, self._due = now, now + 0.01


class Told(Beats):
    """Beats that only count."""

    def __init__(self) -> None:
        super().__init__("r", Dialer())
        self.at: list[float] = []
        self.now = 0.0
        self.rests = 0

    def send(self) -> None:
        self.at.append(self.now)

    def rest(self) -> None:
        self.rests += 1


class Watched:
    """A loop, its watch and its beats, in made-up time."""

    def __init__(self, max_s: float = 30.0) -> None:
        self.loop, self.beats, self.now = Loop(), Told(), time.monotonic()
        self.began = self.now
        self.loop.tick(self.now)
        self.watch = LoopWatch(self.loop, [self.beats], max_s)

    def run(self, seconds: float, turn_s: float | None) -> None:
        """The loop does turns of ``turn_s``, or stands."""
        until_ = self.now + seconds
        while self.now < until_ - 1e-9:
            self.now += LOOK_S
            if turn_s is not None and self.now - self.loop.ticked_at >= turn_s - 1e-9:
                self.loop.tick(self.now)
            self.beats.now = self.now
            self.watch.look(self.now, LOOK_S)

    @property
    def at(self) -> list[float]:
        return [round(at - self.began, 2) for at in self.beats.at]


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Lines of the log with ``text``; they are written in a thread of its own."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not any(text in line for line in caplog.messages):
        time.sleep(0.01)
    time.sleep(0.1)  # for one that is too many
    return [line for line in caplog.messages if text in line]


def test_a_loop_that_runs_needs_nobody() -> None:
    watched = Watched()
    watched.run(60, 0.05)
    assert watched.at == []


def test_a_loop_that_stands_is_spoken_for_twice_a_second() -> None:
    watched = Watched()
    watched.run(10, None)
    assert watched.at[0] <= 0.4
    gaps = [b - a for a, b in zip(watched.at, watched.at[1:], strict=False)]
    assert gaps and all(gap == pytest.approx(0.5, abs=0.11) for gap in gaps)
    watched.run(3, 0.05)
    said = len(watched.at)
    assert watched.at[-1] < 11.2  # and a second more, which heartbeats need to be on their way again
    watched.run(40, 0.05)
    assert len(watched.at) == said
    assert watched.beats.rests > 0  # its connections are closed by then


def test_a_loop_of_many_slow_turns_is_spoken_for_too() -> None:
    watched = Watched()
    watched.run(20, 0.3)
    assert len(watched.at) > 30


def test_a_loop_that_never_comes_back_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(max_s=5.0)
    watched.run(60, None)
    assert 4.4 <= watched.at[-1] <= 5.1
    assert len(said(caplog, "not told any more")) == 1
    watched.run(1, 0.05)
    watched.run(3, None)
    assert watched.at[-1] > 63  # a new turn is a new matter


def test_time_in_which_the_whole_process_was_stopped_is_not_the_loops() -> None:
    watched = Watched()
    watched.run(1, 0.05)
    watched.now += 100
    watched.beats.now = watched.now
    watched.watch.look(watched.now, 100)
    watched.run(10, None)
    assert watched.at[-1] > 110  # after 10 s of its own, not 110


def test_where_a_loop_stands_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.loop.thread = threading.get_ident()
    watched.run(20, None)
    watched.run(1, 0.05)
    watched.run(20, None)
    told = said(caplog, "has stood for")
    assert len(told) == 1
    assert "test_where_a_loop_stands_is_told_once_in_a_while" in told[0]


# --- whom workers believe


class Caller:
    """A router's stream to a worker, which says hello and nothing more; and its beats."""

    def __init__(self, worker: LocalWorker, nonce: bytes = NONCE, router_id: str = "r") -> None:
        self.nonce, self.router_id, self.worker = nonce, router_id, worker
        self.channel = grpc.aio.insecure_channel(worker.address)
        self.call = pb_grpc.WorkerStub(self.channel).Connect(None)

    async def connect(self, *more: pb.RouterMessage) -> pb.WorkerHello:
        hello = await greet_worker(self.call, KEY, self.router_id, self.nonce)
        for message in more:
            await self.call.write(message)
        return hello

    def beat(self, count: int, **other: object) -> pb.RouterBeat:
        """``other``: what its proof is made of, where that is wrong."""
        incarnation = str(other.get("incarnation", self.worker.incarnation))
        key, nonce = other.get("key", KEY), other.get("nonce", self.nonce)
        assert isinstance(key, bytes) and isinstance(nonce, bytes)
        router_id = str(other.get("router_id", self.router_id))
        proof = sign_beat(key, router_id, incarnation, nonce, count)
        return pb.RouterBeat(router_id=self.router_id, count=count, proof=proof)

    async def send(self, beat: pb.RouterBeat) -> grpc.StatusCode:
        call = pb_grpc.RouterPulseStub(self.channel).Beat(beat)
        return await call.code()

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close(None)


@pytest.fixture
async def worker() -> Iterator[LocalWorker]:  # type: ignore[misc]  # pytest's own kind of fixture
    made = LocalWorker("both", tempo=QUICK, step_s=0.02)
    await made.start()
    yield made
    await made.stop()


async def test_beats_are_believed_once_each_on_their_own_stream(worker: LocalWorker) -> None:
    caller = Caller(worker)
    assert await caller.send(caller.beat(1)) == grpc.StatusCode.NOT_FOUND
    await caller.connect()
    assert await caller.send(caller.beat(1)) == grpc.StatusCode.OK
    assert await caller.send(caller.beat(7)) == grpc.StatusCode.OK
    for count in (7, 3, 0):
        assert await caller.send(caller.beat(count)) == grpc.StatusCode.FAILED_PRECONDITION
    wrong: Sequence[dict[str, object]] = (
        {"key": b"another"},
        {"nonce": new_nonce()},
        {"incarnation": "another"},
        {"router_id": "another"},
    )
    for part in wrong:
        assert await caller.send(caller.beat(9, **part)) == grpc.StatusCode.PERMISSION_DENIED, part
    unsigned = pb.RouterBeat(router_id="r", count=9)
    assert await caller.send(unsigned) == grpc.StatusCode.PERMISSION_DENIED
    forged = caller.beat(9)
    forged.count = 10
    assert await caller.send(forged) == grpc.StatusCode.PERMISSION_DENIED
    figures = {
        result: worker.registry.get_sample_value("baton_router_beats_total", {"result": result})
        for result in ("heard", "refused")
    }
    assert figures == {"heard": 2, "refused": 10}
    assert await caller.send(caller.beat(9)) == grpc.StatusCode.OK
    # It calls again: what was recorded on the old stream is worth nothing on the new one.
    recorded = caller.beat(100)
    again = Caller(worker, new_nonce())
    await again.connect()
    assert await caller.send(recorded) == grpc.StatusCode.PERMISSION_DENIED
    await caller.close()
    await again.close()


@pytest.mark.parametrize("size", [1, 15, 17, 4096])
async def test_a_nonce_of_another_size_is_refused(worker: LocalWorker, size: int) -> None:
    caller = Caller(worker, bytes(size))
    with pytest.raises(grpc.aio.AioRpcError, match=f"beat_nonce: must be 16 bytes, not {size}") as refusal:
        await caller.connect()
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await caller.close()


async def test_a_router_that_draws_no_nonce_has_no_beats(worker: LocalWorker) -> None:
    caller = Caller(worker, b"")
    await caller.connect()
    assert await caller.send(caller.beat(1)) == grpc.StatusCode.NOT_FOUND
    await caller.close()


# --- both together


@contextmanager
def watched(beats: Beats, max_s: float) -> Iterator[Loop]:
    """A loop that stands from now on, with everything else real."""
    loop = Loop()
    loop.tick(time.monotonic())
    watch = LoopWatch(loop, [beats], max_s)
    watch.start()
    try:
        yield loop
    finally:
        watch.stop()


async def gone_after(condition: Callable[[], bool], max_s: float) -> float:
    began = time.monotonic()
    await until(condition, max_s)
    return time.monotonic() - began


@pytest.mark.deep
@pytest.mark.parametrize("secure", [False, True])
async def test_a_worker_hears_of_a_router_that_says_nothing_until_the_watch_gives_it_up(
    tmp_path: Path, secure: bool
) -> None:
    authority = Authority.new(tmp_path) if secure else None
    worker = LocalWorker("both", tempo=QUICK, tls=authority.files("worker") if authority else None)
    await worker.start()
    dialer = Dialer(authority.files("router") if authority else None)
    beats = Beats("r", dialer.another())
    nonce = new_nonce()
    async with dialer.channel(worker.address, ()) as channel:
        call = pb_grpc.WorkerStub(channel).Connect(None)
        await greet_worker(call, KEY, "r", nonce)
        await until(lambda: worker.routers.connected("r"))
        with beats.to(worker.address, worker.incarnation, nonce, KEY), watched(beats, max_s=3.0):
            assert 3.0 < await gone_after(lambda: not worker.routers.connected("r"), 10) < 6.0
        call.cancel()
    await worker.stop()


async def test_a_router_that_nobody_speaks_for_is_given_up_as_ever(worker: LocalWorker) -> None:
    caller = Caller(worker)
    await caller.connect()
    assert await gone_after(lambda: not worker.routers.connected("r"), 5) < 2.0
    await caller.close()


@pytest.mark.deep
async def test_workers_that_hang_keep_no_other_from_hearing() -> None:
    """Many more of them than there are threads."""
    worker = LocalWorker("both", tempo=Tempo(busy_silence_s=2.0, idle_silence_s=2.0))
    await worker.start()
    beats = Beats("r", Dialer())
    caller = Caller(worker)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as hanging, ExitStack() as lines:
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        for number in range(120):
            lines.enter_context(beats.to(address, str(number), NONCE, KEY))
        with watched(beats, max_s=30.0):
            await asyncio.sleep(0.5 + 120 * ANSWER_S / CALLERS)  # for each of them to be tried
            await caller.connect()
            lines.enter_context(beats.to(worker.address, worker.incarnation, NONCE, KEY))
            await asyncio.sleep(4.0)
    heard = worker.registry.get_sample_value("baton_router_beats_total", {"result": "heard"})
    assert heard is not None and heard >= 5
    assert worker.routers.connected("r")
    await caller.close()
    await worker.stop()
