"""A worker that is told to stop finishes what it has; its routers place new requests elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton.process import ready
from baton.worker.drain import LIVE_SERVICE
from tests.support.clients import Answer, RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, Service, running_ring, scrape
from tests.support.tiny_models import TINY_MODELS

UNCACHED = ("--no-prefix-caching",)
NO_WAITING = ("--queue-timeout", "0")
PROMPTS = [[100 + number, *range(200, 800)] for number in range(10)]
LONG = {"max_tokens": 1500, "temperature": 0}


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    for _ in iter(condition, True):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


def gauge(service: Service, name: str) -> float:
    """A metric of a worker that has no label besides its role."""
    found = [value for key, value in service.metrics().items() if key.startswith(name + "{")]
    return sum(found)


async def health(worker: Service, service: str = "") -> int:
    """What a Kubernetes probe hears."""
    assert isinstance(worker.ready, ready.WorkerReady)
    async with grpc.aio.insecure_channel(worker.ready.address) as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(service=service))
    return int(answer.status)


def draining(ring: Ring, worker: Service) -> bool:
    """Whether the router knows."""
    assert isinstance(worker.ready, ready.WorkerReady)
    samples = scrape(f"{ring.url}/metrics").items()
    return any(value for key, value in samples if "worker_draining" in key and worker.ready.address in key)


@pytest.fixture
async def ring(tmp_path: Path) -> AsyncIterator[Ring]:
    with running_ring(tmp_path, options=UNCACHED, router_options=NO_WAITING) as running:
        yield running


async def ended(worker: Service, seconds: float = 60) -> int:
    """The exit status of a worker that ends by itself."""
    return await asyncio.to_thread(worker.process.wait, seconds)


async def answers(client: RingClient, max_tokens: int) -> list[list[int]]:
    asked = (client.stream(prompt, max_tokens=max_tokens, temperature=0) for prompt in PROMPTS)
    return [answer.token_ids for answer in await asyncio.gather(*asked)]


@pytest.mark.parametrize("role", all_deep_but(1, ["prefill", "decode"]))
async def test_a_drain_under_load_loses_nothing_and_ends_with_nothing_open(ring: Ring, role: str) -> None:
    worker = ring.of_role(role)[0]
    # Long enough for answers to meet on decode, however fast it is.
    max_tokens = {"prefill": 40, "decode": 400}[role]
    async with RingClient(ring.url, "demo") as client:
        undisturbed = await answers(client, max_tokens)
        asked = asyncio.create_task(answers(client, max_tokens))
        if role == "prefill":
            await until(lambda: gauge(worker, "baton_handoffs_open") >= 8)
        else:
            await until(lambda: gauge(worker, "baton_sequences_running") >= 4)
        worker.process.terminate()
        await until(lambda: draining(ring, worker))
        assert worker.process.poll() is None, "it has requests"
        if role == "prefill":
            # Nobody prefills any more but decode, which takes new requests whole.
            late = await client.complete([5, 6, 7], max_tokens=8, temperature=0)
            assert len(late.token_ids) == 8
        else:
            with pytest.raises(httpx.HTTPStatusError, match="no worker that can decode is ready"):
                await client.complete([5, 6, 7], max_tokens=8, temperature=0)
        assert await ended(worker) == 0
        assert await asked == undisturbed
    log = worker.log.read_text()
    assert "drained" in log and "still open" not in log
    assert "are lost" not in ring.router.log.read_text()
    for other in ring.workers:
        if other is not worker:
            assert other.blocks()["held"] == 0


@asynccontextmanager
async def steady_load(client: RingClient, clients: int) -> AsyncIterator[list[Answer]]:
    """So many clients ask one request after the other; whatever fails is raised at the end."""
    done: list[Answer] = []
    stop = asyncio.Event()

    async def ask(number: int) -> None:
        while not stop.is_set():
            prompt = [number, len(done) % 256, *range(60)]
            done.append(await client.complete(prompt, max_tokens=16, temperature=0))

    asking = [asyncio.create_task(ask(number)) for number in range(clients)]
    yield done
    stop.set()
    await asyncio.gather(*asking)


async def test_with_another_worker_of_the_role_no_client_notices(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3"](tmp_path / "qwen3")
    options = ("--num-blocks", "512")
    with running_ring(tmp_path, model=str(model), prefill=2, decode=2, options=options) as ring:
        async with RingClient(ring.url, "qwen3") as client, steady_load(client, 12) as done:
            for worker in (ring.of_role("prefill")[0], ring.of_role("decode")[0]):
                before = len(done)
                await until(lambda: len(done) > before + 20)  # noqa: B023
                worker.process.terminate()
                assert await ended(worker) == 0
                before = len(done)
                await until(lambda: len(done) > before + 20)  # noqa: B023
        assert all(len(answer.token_ids) == 16 for answer in done)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One worker that drains for a second at most. Tests start it again."""
    options = ("--drain-timeout", "1")
    with running_ring(
        tmp_path_factory.mktemp("one"),
        prefill=0,
        decode=0,
        both=1,
        options=options,
        router_options=NO_WAITING,
    ) as ring:
        yield ring


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_a_drain_at_once(impatient: Ring, number: int) -> None:
    worker = impatient.workers[0]
    async with RingClient(impatient.url, "demo") as client:
        asked = asyncio.create_task(client.stream([1, 2, 3], **LONG))
        await until(lambda: gauge(worker, "baton_sequences_running") == 1)
        worker.process.send_signal(number)
        await until(lambda: draining(impatient, worker))
        assert await health(worker) == HealthCheckResponse.NOT_SERVING
        assert await health(worker, LIVE_SERVICE) == HealthCheckResponse.SERVING, "nobody is to kill it"
        worker.process.send_signal(number)
        assert await ended(worker) == 1
        assert "told to stop twice" in worker.log.read_text()
        with pytest.raises(RuntimeError, match="lost"):
            await asked
    worker.restart()
    impatient.wait_workers()


async def test_a_drain_timeout_says_what_was_open(impatient: Ring) -> None:
    worker = impatient.workers[0]
    async with RingClient(impatient.url, "demo") as client:
        asked = asyncio.create_task(client.stream([1, 2, 3], **LONG))
        await until(lambda: gauge(worker, "baton_sequences_running") == 1)
        worker.process.terminate()
        assert await ended(worker) == 1
        assert "took longer than 1 s; still open: 1 sequences" in worker.log.read_text()
        with pytest.raises(RuntimeError, match="lost"):
            await asked
    worker.restart()
    impatient.wait_workers()


async def test_an_idle_worker_ends_at_once(impatient: Ring) -> None:
    worker = impatient.workers[0]
    worker.process.terminate()
    assert await ended(worker) == 0
    assert "still open" not in worker.log.read_text().rpartition("draining:")[2]
    worker.restart()
    impatient.wait_workers()
