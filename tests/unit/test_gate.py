"""The queue in front of the ring, as clients meet it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.admission.capacity import Capacity, capacity_of
from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueBounds, QueuedRequest, RefusedError
from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import RingError
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app, until
from tests.support.fake_ring import FakeRing
from tests.support.local_worker import LocalWorker, local_ring
from tests.support.tiny_tokenizers import byte_level_tokenizer

BOUNDS = QueueBounds(requests=8, prompt_tokens=1000, max_wait_s=5.0)


@dataclass
class Room:
    """What a gate is told there is."""

    now: Capacity | None = field(default_factory=lambda: Capacity(1))

    def __call__(self) -> Capacity | None:
        return self.now


def gate_of(room: Room, bounds: QueueBounds = BOUNDS) -> Gate:
    return Gate(bounds, room, AdmissionMetrics(CollectorRegistry()))


def asked(tenant: str = "t", **fields: object) -> QueuedRequest:
    return QueuedRequest(tenant=tenant, prompt_tokens=5, max_outputs=5, **fields)  # type: ignore[arg-type]


class TestGate:
    async def test_everybody_is_let_in_until_something_is_known(self) -> None:
        gate = gate_of(Room(None))
        for _ in range(50):
            await gate.enter(asked())
        assert gate.view().open_answers == 50

    async def test_what_was_known_last_holds_while_nobody_can_answer(self) -> None:
        room = Room(Capacity(2))
        gate = gate_of(room)
        first, _ = await gate.enter(asked()), await gate.enter(asked())
        room.now = None
        third = asyncio.create_task(gate.enter(asked()))
        await asyncio.sleep(0.15)
        assert not third.done()
        gate.leave(first, 3, completed=True)
        await third

    async def test_more_room_is_noticed(self) -> None:
        room = Room(Capacity(1))
        gate = gate_of(room)
        await gate.enter(asked())
        second = asyncio.create_task(gate.enter(asked()))
        await asyncio.sleep(0.05)
        room.now = Capacity(2)
        await asyncio.wait_for(second, 60)

    async def test_whoever_leaves_while_it_waits_takes_no_room(self) -> None:
        gate = gate_of(Room())
        first = await gate.enter(asked())
        second, third = (asyncio.create_task(gate.enter(asked())) for _ in range(2))
        await asyncio.sleep(0.01)
        second.cancel()
        gate.leave(first, 1, completed=True)  # in the same moment
        await asyncio.wait({second}, timeout=1)
        entry = await asyncio.wait_for(third, 60)
        assert gate.view().waiting == 0 and gate.view().open_answers == 1
        gate.leave(entry, 1, completed=True)
        assert gate.view().open_answers == 0

    async def test_cancelled_in_the_moment_of_its_turn(self) -> None:
        registry = CollectorRegistry()
        gate = Gate(BOUNDS, Room(), AdmissionMetrics(registry))
        first = await gate.enter(asked())
        second = asyncio.create_task(gate.enter(asked()))
        await asyncio.sleep(0.01)
        gate.leave(first, 1, completed=True)
        second.cancel()
        await asyncio.wait({second}, timeout=1)
        assert second.cancelled() and gate.view().open_answers == 0
        tokens = registry.get_sample_value("baton_admission_tokens_total", {"tenant": "t"})
        assert tokens == 5 + 1, "of the first: the second had nothing done for it"

    async def test_a_turn_that_does_not_come(self) -> None:
        gate = gate_of(Room(), QueueBounds(requests=8, prompt_tokens=1000, max_wait_s=0.1))
        await gate.enter(asked())
        with pytest.raises(RefusedError, match="did not come in time"):
            await gate.enter(asked())
        with pytest.raises(RingError, match="deadline"):
            await gate.enter(asked(deadline=time.monotonic() + 0.02))
        assert gate.view().waiting == 0

    async def test_a_deadline_has_passed_when_its_timer_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped = time.monotonic()  # worse than a timer that is early by a millisecond, as uvloop's are
        monkeypatch.setattr("baton.router.admission.gate.time", SimpleNamespace(monotonic=lambda: stopped))
        gate = gate_of(Room())
        await gate.enter(asked())
        with pytest.raises(RingError, match="deadline"):
            await gate.enter(asked(deadline=stopped + 0.02))


async def test_capacity_follows_from_what_workers_say() -> None:
    workers = [LocalWorker("prefill"), LocalWorker("decode"), LocalWorker("both")]
    async with local_ring(workers) as ring:
        seats = 2 * workers[1].engine.scheduler.limits.max_num_seqs
        pool = workers[1].engine.pool
        found = capacity_of(ring.fleet.workers, 1)
        assert found is not None
        assert found.seats == -(-seats * 5 // 4) + 4
        assert found.tokens == -(-2 * pool.num_blocks * pool.block_size * 5 // 4)
        await until(lambda: (capacity_of(ring.fleet.workers, 1) or found).spare > 0)
        half = capacity_of(ring.fleet.workers, 2)
        assert half is not None and half.seats < found.seats
    assert capacity_of([], 1) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def serving(ring: FakeRing, tokenizer: Tokenizer, gate: Gate) -> AsyncIterator[httpx.AsyncClient]:
    clients = {name: Client(tenant=Tenant(name), key=name) for name in "ab"}
    service = CompletionService(
        ring,
        tokenizer,
        ApiSettings(),
        RouterMetrics(CollectorRegistry()),
        authentication=Authentication(clients.get, Tenant()),
        gate=gate,
    )
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


async def test_refusals_come_at_once_and_say_when_to_try_again(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: [10, 11, 12], delay=0.05)
    gate = gate_of(Room(), QueueBounds(requests=5, prompt_tokens=1000, max_wait_s=30.0))
    async with serving(ring, tokenizer, gate) as client:

        async def ask(tenant: str, **fields: object) -> tuple[httpx.Response, float]:
            body = {"prompt": [5, 6], "max_tokens": 4, **fields}
            began = time.monotonic()
            response = await client.post("/v1/completions", json=body, headers={"x-api-key": tenant})
            return response, time.monotonic() - began

        first = asyncio.create_task(ask("a"))
        await until(lambda: gate.view().open_answers == 1)
        waiting = [asyncio.create_task(ask("a")) for _ in range(4)]
        await until(lambda: gate.view().waiting == 4)
        refused, seconds = await ask("a")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert seconds < 0.15  # of a machine that does other things too
        unread = await client.post("/v1/completions", content=b"{" * 1000, headers={"x-api-key": "a"})
        assert unread.status_code == 429, "nothing of it was read"
        other = asyncio.create_task(ask("b", stream=True))
        await until(lambda: gate.view().waiting == 5)
        full, _ = await ask("b")
        assert full.status_code == 503 and full.json()["error"]["code"] == "overloaded"
        assert "retry-after" in full.headers
        for task in (first, other, *waiting):
            response, _ = await task
            assert response.status_code == 200
        assert gate.view().open_answers == 0
        order = [call.prompt_ids for call in ring.calls]
        assert len(order) == 6, "the refused never reached the ring"


@pytest.mark.deep
async def test_what_the_queue_refuses_has_used_nothing(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: [10, 11, 12], delay=0.3)
    gate = gate_of(Room(), QueueBounds(requests=8, prompt_tokens=150, max_wait_s=30.0))
    tenant = Tenant("a", Limits(tokens_per_day=1000))
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(ring, tokenizer, ApiSettings(), metrics, tenant=tenant, gate=gate)
    body = {"prompt": [5] * 100, "max_tokens": 3}
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url) as client:
        held = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: gate.view().waiting == 1)
        refused = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(20)))
        assert {response.status_code for response in refused} <= {429, 503}
        for task in held:
            assert (await task).status_code == 200
        for _ in range(5):  # of 1,000 tokens 206 are used
            answered = await client.post("/v1/completions", json=body)
            assert answered.status_code == 200, answered.text


async def test_a_client_that_leaves_the_queue_is_never_computed(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: [10, 11, 12], delay=0.05)
    gate = gate_of(Room())
    async with serving(ring, tokenizer, gate) as client:
        body = {"prompt": [5, 6], "max_tokens": 10}
        first = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-api-key": "a"}))
        await until(lambda: gate.view().open_answers == 1)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, headers={"x-api-key": "a"}, timeout=0.1)
        await until(lambda: gate.view().waiting == 0)
        assert (await first).status_code == 200
        assert len(ring.calls) == 1
