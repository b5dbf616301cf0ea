"""A router whose event loop does one turn of seconds lives, and loses no request for it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from baton.process import ready
from tests.support.clients import Answer, RingClient
from tests.support.ring import Ring, Service, running, scrape, simulated

pytestmark = [pytest.mark.beside, pytest.mark.deep]

TURN_S = 5.0
"""More than twice what a busy worker takes for death."""
STREAMS = 4
PROMPT = list(range(100, 400))
LENGTH = 200
PROFILE = '{"step_base_ms": 20, "prefill_ms_per_1k": 20}'
ONCE = ("--max-attempts", "1", "--disaggregation", "always")
"""What is lost stays lost, and is not hidden by another attempt."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    tmp = tmp_path_factory.mktemp("turns")
    (tmp / "profile.json").write_text(PROFILE)
    options = ("--profile", str(tmp / "profile.json"))
    found = [simulated(tmp, role, role, *options) for role in ("prefill", "decode")]
    with running(found):
        yield found


@asynccontextmanager
async def stalling(tmp: Path, workers: Sequence[Service], *turn: str) -> AsyncIterator[Ring]:
    """A ring whose router does a turn as in ``tests.support.stalling_router`` at SIGUSR1."""
    at = [w.ready.address for w in workers if isinstance(w.ready, ready.WorkerReady)]
    flags = [flag for address in at for flag in ("--worker", address)]
    argv = (*turn, "router", "--port", "0", "--grpc-port", "0", *flags, *ONCE)
    router = Service("router", argv, tmp / "router.log", "tests.support.stalling_router")
    router.start()
    try:
        await asyncio.to_thread(router.wait_ready)
        ring = Ring(router, list(workers))
        await asyncio.to_thread(ring.wait_workers)
        yield ring
    finally:
        router.stop()


async def answers_through_a_turn(ring: Ring) -> list[Answer | BaseException]:
    """What becomes of streams when the router stands still amid them."""
    async with RingClient(ring.url, "demo") as client:
        streams = [
            asyncio.create_task(client.stream([number, *PROMPT], max_tokens=LENGTH))
            for number in range(STREAMS)
        ]
        await asyncio.sleep(1.0)
        ring.router.process.send_signal(signal.SIGUSR1)
        return await asyncio.gather(*streams, return_exceptions=True)


def beats(workers: Sequence[Service], result: str) -> list[float]:
    return [worker.metrics()[f'baton_router_beats_total{{result="{result}"}}'] for worker in workers]


@pytest.mark.parametrize("how", ["sleep", "work"])
async def test_no_request_is_lost_by_a_long_turn(tmp_path: Path, workers: list[Service], how: str) -> None:
    heard, refused = (beats(workers, result) for result in ("heard", "refused"))
    async with stalling(tmp_path, workers, how, str(TURN_S), "watched") as ring:
        began = time.monotonic()
        answers = await answers_through_a_turn(ring)
        assert time.monotonic() - began > TURN_S, "the router did not stand still"
        for answer in answers:
            assert isinstance(answer, Answer), answer
            assert len(answer.token_ids) == LENGTH
        for before, now in zip(heard, beats(workers, "heard"), strict=True):
            assert now - before >= TURN_S / 0.5 / 2
        assert beats(workers, "refused") == refused
        figures = scrape(f"{ring.url}/metrics")
        assert figures["baton_router_event_loop_longest_turn_seconds"] == pytest.approx(TURN_S, rel=0.5)
        assert figures['baton_router_event_loop_lag_seconds_bucket{le="2.5"}'] == (
            figures["baton_router_event_loop_lag_seconds_count"] - 1
        )
    log = (tmp_path / "router.log").read_text()
    assert log.count("the event loop has stood for") == 1
    assert "stalling_router" in log  # the place
    assert all("is silent" not in worker.log.read_text() for worker in workers)


async def test_without_the_watch_they_would_be(tmp_path: Path, workers: list[Service]) -> None:
    async with stalling(tmp_path, workers, "sleep", str(TURN_S), "alone") as ring:
        answers = await answers_through_a_turn(ring)
        assert all(isinstance(answer, RuntimeError | httpx.HTTPError) for answer in answers), answers
