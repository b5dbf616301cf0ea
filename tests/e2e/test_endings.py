"""A process that is told to end does, and says what hindered it. What a drain cuts off is one line."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from baton.process.ending import EXIT_HUNG, MAX_END_S
from tests.support.clients import RingClient
from tests.support.ring import Service, running, running_routers, simulated

pytestmark = pytest.mark.beside

DRAIN_S = 1
PROGRAM = "tests.support.stubborn"
NOBODY = ("--worker", "127.0.0.1:9", "--port", "0", "--grpc-port", "0")
ROUTER = ("router", *NOBODY, "--drain-timeout", str(DRAIN_S))
WORKER = ("worker-sim", "--port", "0", "--drain-timeout", str(DRAIN_S))
SLACK_S = 4.0


def ended_after(service: Service, *signals: int) -> float:
    service.start()
    service.wait_ready()
    time.sleep(0.5)
    began = time.monotonic()
    for number in signals:
        service.process.send_signal(number)
        time.sleep(0.3)
    assert service.process.wait(30) == EXIT_HUNG
    return time.monotonic() - began


@pytest.mark.deep
@pytest.mark.parametrize(
    ("what", "places"),
    [
        ("task", ("task garbage", "in stubborn_task")),
        ("thread", ("thread uvloop_0",)),  # a task that waits for a thread ends, and the process does not
    ],
)
def test_a_router_that_does_not_end_says_why_and_ends(
    tmp_path: Path, what: str, places: tuple[str, ...]
) -> None:
    router = Service("router", (what, *ROUTER), tmp_path / "log", PROGRAM)
    took = ended_after(router, signal.SIGTERM)
    assert DRAIN_S + MAX_END_S <= took < DRAIN_S + MAX_END_S + SLACK_S
    log = router.log.read_text()
    assert f"exit with status {EXIT_HUNG}" in log
    assert all(place in log for place in places)
    router.stop()


@pytest.mark.deep
def test_a_second_signal_leaves_it_less_time(tmp_path: Path) -> None:
    router = Service("router", ("task", *ROUTER[:-1], "60"), tmp_path / "log", PROGRAM)
    assert ended_after(router, signal.SIGTERM, signal.SIGTERM) < MAX_END_S + SLACK_S
    router.stop()


@pytest.mark.deep
def test_a_worker_that_does_not_end_says_why_and_ends(tmp_path: Path) -> None:
    worker = Service("worker", ("task", *WORKER), tmp_path / "log", PROGRAM)
    assert ended_after(worker, signal.SIGTERM) < DRAIN_S + MAX_END_S + SLACK_S
    log = worker.log.read_text()
    assert "in stubborn_task" in log
    worker.stop()


@pytest.mark.parametrize("program", ["router", "worker"])
def test_one_that_ends_in_order_says_nothing_of_it(tmp_path: Path, program: str) -> None:
    service = Service(program, ROUTER if program == "router" else WORKER, tmp_path / "log")
    service.start()
    service.wait_ready()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 0
    assert "does not end" not in service.log.read_text()
    service.stop()


async def test_streams_that_a_drain_cuts_are_one_line(tmp_path: Path) -> None:
    worker = simulated(tmp_path, "worker", "both")
    with (
        running([worker]),
        running_routers(tmp_path, "demo", {"router": [worker]}, ("--drain-timeout", str(DRAIN_S))) as rings,
    ):
        router = rings["router"].router
        async with RingClient(rings["router"].url, "demo") as client:
            streams = [asyncio.create_task(client.stream([1, 2, 3], max_tokens=3000)) for _ in range(3)]
            await asyncio.sleep(1)
            router.process.send_signal(signal.SIGTERM)
            ends = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(end, httpx.RemoteProtocolError | RuntimeError) for end in ends), ends
        assert router.process.wait(60) == 0
        log = router.log.read_text()
        assert "Traceback" not in log
        assert log.count("3 open requests are cut") == 1
