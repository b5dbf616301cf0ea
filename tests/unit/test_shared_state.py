"""Two routers and a real redis-server that is killed, stopped, filled and flushed under them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.router.shared.failures import StoreError
from baton.router.shared.limits import (
    BUCKET_MS,
    MEASURES,
    WINDOW_MS,
    LimitDecision,
    Limits,
    Tenant,
    bucket_of,
)
from baton.router.shared.redis_client import PASSWORD_VARIABLE
from baton.router.shared.redis_store import BucketDelta, RedisStore, connect
from baton.router.shared.state import SharedState
from baton.router.shared.windows import Account
from baton.telemetry.shared import SharedStateMetrics
from tests.support.deep import all_deep_but
from tests.support.local_worker import until
from tests.support.redis_server import RedisServer, needs_redis

TIMEOUT_S = 0.03
PATIENT_S = 1.0
"""Where it is the sums that count, on a machine that may have much else to do."""
MAX_DELAY_S = 0.05


class Lossy(RedisStore):
    """Some calls never reach Redis, and others are late."""

    def __init__(self, url: str, password_file: str | None, timeout_s: float) -> None:
        super().__init__(connect(url, password_file, timeout_s), timeout_s)
        self.lost: Counter[str] = Counter()
        self.late_s = 0.0
        self.settling = 0

    async def admit(self, tenant: Tenant, tokens: int, lease: str) -> tuple[LimitDecision, int]:
        self._lose("admit")
        answer = await super().admit(tenant, tokens, lease)
        await asyncio.sleep(self.late_s)
        return answer

    async def settle(
        self, tenant: str, ended: Sequence[str], held: Sequence[str], deltas: Sequence[BucketDelta]
    ) -> None:
        self._lose("settle")
        self.settling += 1
        await asyncio.sleep(self.late_s)
        await super().settle(tenant, ended, held, deltas)

    def _lose(self, call: str) -> None:
        if self.lost[call]:
            self.lost[call] -= 1
            raise StoreError("timeout", "lost", unsure=True)


class Router:
    """One router's share of the state, and its metrics."""

    def __init__(
        self, url: str | None, password_file: str | None = None, timeout_s: float = PATIENT_S
    ) -> None:
        self.registry = CollectorRegistry()
        store = None
        if url is not None:
            store = self.store = Lossy(url, password_file, timeout_s)
        self.on_its_way: dict[str, tuple[int, int]] = {}
        self.elsewhere: dict[str, tuple[int, int]] = {}
        self.state = SharedState(
            store,
            SharedStateMetrics(self.registry),
            mine=lambda: self.on_its_way,
            elsewhere=lambda told: setattr(self, "elsewhere", dict(told)),
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def up(self) -> bool:
        return bool(self.metric("baton_shared_state_up"))


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def two(redis_server: RedisServer, timeout_s: float = PATIENT_S) -> AsyncIterator[list[Router]]:
    found = [Router(redis_server.url, timeout_s=timeout_s) for _ in range(2)]
    for router in found:
        router.state.start()
    await until(lambda: all(router.state.replicas == 2 for router in found))
    yield found
    for router in found:
        await router.state.close()


@pytest.fixture
async def routers(redis_server: RedisServer) -> AsyncIterator[list[Router]]:
    async with two(redis_server) as found:
        yield found


@pytest.fixture
async def hasty(redis_server: RedisServer) -> AsyncIterator[list[Router]]:
    """They wait for Redis for as long as routers do."""
    async with two(redis_server, TIMEOUT_S) as found:
        yield found


async def ask(router: Router, tenant: Tenant, seconds: float, tokens: int = 1, used: int = 1) -> list[bool]:
    """Ask without a pause; whether each request was admitted."""
    answers = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        decision, lease = await router.state.admit(tenant, tokens)
        answers.append(decision.refused_by is None)
        if lease is not None:
            router.state.settle(lease, used)
        await asyncio.sleep(0.0005)
    return answers


def counted(server: RedisServer, what: str) -> int:
    """By Redis, of tenant t."""
    found = cast(list[bytes], server.client().hvals(f"{{baton:tenant:t}}:{what}"))
    return sum(map(int, found))


@needs_redis
async def test_two_routers_keep_a_limit_together(routers: list[Router]) -> None:
    tenant = Tenant("t", Limits(requests_per_minute=400))
    answers = await asyncio.gather(*(ask(router, tenant, 1.5) for router in routers))
    admitted = [sum(each) for each in answers]
    assert sum(admitted) == 400 and min(admitted) > 50
    assert all(
        router.metric("baton_limit_decisions_total", tenant="t", decision="requests", by="redis")
        for router in routers
    )


@needs_redis
async def test_tokens_that_were_not_used_come_back_to_all(routers: list[Router]) -> None:
    tenant = Tenant("t", Limits(tokens_per_minute=5000))
    first, second = routers
    decision, lease = await first.state.admit(tenant, 5000)
    assert lease is not None and decision.tokens is not None and decision.tokens.remaining == 0
    decision, _ = await second.state.admit(tenant, 100)
    assert decision.refused_by == "tokens" and 59_000 < decision.wait_ms <= 60_500
    first.state.settle(lease, 1000)
    await asyncio.sleep(0.2)
    decision, _ = await second.state.admit(tenant, 4000)
    assert decision.refused_by is None
    decision, _ = await second.state.admit(tenant, 1)
    assert decision.refused_by == "tokens"


@needs_redis
async def test_requests_under_way_count_everywhere_until_they_end(routers: list[Router]) -> None:
    tenant = Tenant("t", Limits(concurrent=2))
    first, second = routers
    leases = [(await router.state.admit(tenant, 1))[1] for router in routers]
    assert (await first.state.admit(tenant, 1))[0].refused_by == "concurrent"
    assert leases[0] is not None
    first.state.settle(leases[0], 1)
    await asyncio.sleep(0.2)
    assert (await second.state.admit(tenant, 1))[0].refused_by is None


@needs_redis
async def test_a_request_has_ended_though_telling_it_was_lost(routers: list[Router]) -> None:
    tenant, (first, second) = Tenant("t", Limits(concurrent=1)), routers
    _, lease = await first.state.admit(tenant, 1)
    assert lease is not None
    first.store.lost["settle"] = 1
    first.state.settle(lease, 1)
    await until(lambda: not first.store.lost["settle"])
    await asyncio.sleep(0.2)
    assert (await second.state.admit(tenant, 1))[0].refused_by is None


@needs_redis
async def test_what_may_never_have_been_counted_is_not_taken_back(
    routers: list[Router], redis_server: RedisServer
) -> None:
    tenant, (first, second) = Tenant("t", Limits(tokens_per_day=1000)), routers
    _, lease = await second.state.admit(tenant, 600)
    for used in (10, 150):
        first.store.lost["admit"] = 1
        _, lease = await first.state.admit(tenant, 100)
        assert lease is not None
        first.state.settle(lease, used)
    await until(lambda: counted(redis_server, "days") == 650)
    await asyncio.sleep(0.2)
    assert counted(redis_server, "days") == 650, "of both what is sure: the 50 that were not reserved"


@needs_redis
async def test_a_timeout_before_there_is_a_connection_is_no_doubt(redis_server: RedisServer) -> None:
    stores = [RedisStore(connect(redis_server.url, None, 0.2), 0.2) for _ in range(2)]
    tenant = Tenant("t", Limits(tokens_per_day=1000))
    await stores[0].admit(tenant, 1, "first")  # it has a connection
    redis_server.freeze()
    for store, unsure in zip(stores, (True, False), strict=True):
        with pytest.raises(StoreError) as failed:
            await store.admit(tenant, 100, "second")
        assert (failed.value.word, failed.value.unsure) == ("timeout", unsure)
    redis_server.thaw()
    await until(lambda: counted(redis_server, "days") == 101)
    for store in stores:
        await store.close()


@needs_redis
async def test_a_client_that_leaves_while_redis_is_asked_has_used_nothing(
    routers: list[Router], redis_server: RedisServer
) -> None:
    limits = Limits(requests_per_minute=9, tokens_per_minute=900, concurrent=1, tokens_per_day=900)
    tenant, (first, second) = Tenant("t", limits), routers
    first.store.late_s = 0.1
    asking = asyncio.create_task(first.state.admit(tenant, 900))
    await until(lambda: counted(redis_server, "days") == 900)
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: counted(redis_server, "days") == 0)
    assert counted(redis_server, "requests") == counted(redis_server, "tokens") == 0
    assert (await second.state.admit(tenant, 900))[0].refused_by is None


@needs_redis
async def test_what_is_being_told_is_told_before_a_router_goes(
    routers: list[Router], redis_server: RedisServer
) -> None:
    state, store = routers[0].state, routers[0].store
    _, lease = await state.admit(Tenant("t", Limits(tokens_per_day=900)), 900)
    assert lease is not None
    store.late_s = 0.1
    state.settle(lease, 5)
    await until(lambda: store.settling == 1)
    await state.close()
    assert counted(redis_server, "days") == 5


@needs_redis
async def test_what_a_dead_router_had_under_way_goes_with_it(
    routers: list[Router], monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    monkeypatch.setattr("baton.router.shared.redis_store.LEASE_MS", 300)
    monkeypatch.setattr("baton.router.shared.state.LIFE_MS", 600)
    tenant = Tenant("t", Limits(concurrent=1))
    first, second = routers
    first.on_its_way = {"w:1": (3, 700)}
    await until(lambda: second.elsewhere == {"w:1": (3, 700)})
    await first.state.admit(tenant, 1)
    assert (await second.state.admit(tenant, 1))[0].refused_by == "concurrent"
    for task in first.state._tasks:  # it dies, and says nothing more
        task.cancel()
    await until(lambda: second.elsewhere == {} and second.state.replicas == 1)
    assert (await second.state.admit(tenant, 1))[0].refused_by is None


@needs_redis
@pytest.mark.parametrize("fault", all_deep_but(1, ["stopped", "killed", "full"]))
async def test_without_redis_no_request_fails_or_waits_and_limits_are_local(
    hasty: list[Router], redis_server: RedisServer, fault: str
) -> None:
    routers = hasty
    tenant = Tenant("t", Limits(requests_per_minute=1000))
    before = [sum(each) for each in await asyncio.gather(*(ask(r, tenant, 0.1) for r in routers))]
    {"stopped": redis_server.freeze, "killed": redis_server.kill, "full": redis_server.fill}[fault]()
    delays, admitted = [], 0
    for _ in range(150):
        for router in routers:
            began = time.perf_counter()
            decision, _ = await router.state.admit(tenant, 1)
            delays.append(time.perf_counter() - began)
            admitted += decision.refused_by is None
        await asyncio.sleep(0.002)
    assert admitted == 300
    # The process itself may be kept from running, and then sees no timeout.
    assert sorted(delays)[-4] < MAX_DELAY_S
    word = {"stopped": "timeout", "killed": "connection", "full": "full"}[fault]
    for router in routers:
        assert not router.up
        failed = sum(
            router.metric("baton_shared_state_calls_total", call=call, result=word)
            for call in ("admit", "beat", "settle")
        )
        assert failed > 0
        assert router.metric("baton_limit_decisions_total", tenant="t", decision="admitted", by="local")
    {"stopped": redis_server.thaw, "killed": redis_server.start, "full": redis_server.empty}[fault]()
    await until(lambda: all(router.up for router in routers))
    await asyncio.sleep(0.5)
    decision, _ = await routers[0].state.admit(tenant, 1)
    assert decision.requests is not None
    counted = 1000 - decision.requests.remaining
    assert abs(counted - (sum(before) + 301)) <= 8, "Redis was told of what was admitted meanwhile"


@needs_redis
async def test_without_redis_a_router_knows_what_the_others_had_used(
    routers: list[Router], redis_server: RedisServer
) -> None:
    limits = Limits(requests_per_minute=100, tokens_per_minute=1000)
    tenant, (first, second) = Tenant("t", limits), routers
    for _ in range(3):
        decision, _ = await first.state.admit(tenant, 300)
        assert decision.refused_by is None
    assert (await second.state.admit(tenant, 300))[0].refused_by == "tokens"
    redis_server.kill()
    for _ in range(50):
        decision, _ = await second.state.admit(tenant, 101)
        assert decision.refused_by == "tokens"
    assert (await second.state.admit(tenant, 100))[0].refused_by is None
    assert second.metric("baton_limit_decisions_total", tenant="t", decision="admitted", by="local") == 1


@needs_redis
async def test_a_refused_request_counts_everywhere_and_holds_nothing(routers: list[Router]) -> None:
    limits = Limits(requests_per_minute=3, tokens_per_minute=10, concurrent=1)
    tenant, (first, second) = Tenant("t", limits), routers
    for _ in range(3):
        assert (await first.state.count_request(tenant)).refused_by is None
    await asyncio.sleep(0.2)
    decision, _ = await second.state.admit(tenant, 1)
    assert decision.refused_by == "requests"
    assert decision.tokens is not None and decision.tokens.remaining == 10
    refused = await second.state.count_request(tenant)
    assert refused.refused_by == "requests" and refused.wait_ms > 50_000
    without = await first.state.count_request(Tenant("u", Limits(tokens_per_minute=1)))
    assert without.refused_by is None


def test_after_a_long_outage_the_newest_is_told() -> None:
    state, first = Router("redis://127.0.0.1:1/0").state, bucket_of(1_800_000_000_000)
    minute, hours = WINDOW_MS // BUCKET_MS, 60 * WINDOW_MS // BUCKET_MS * 5
    for bucket in range(first, first + hours):
        state._owe("t", bucket, 100, requests=1)
        state._owe("t", bucket - 2 * minute, -40, requests=0)  # of one that took two minutes
        state._end("t", str(bucket))
    pending = state._pending["t"]
    assert sum(amount for (kind, _), amount in pending.amounts.items() if kind == "quota") == 60 * hours
    for kind, each in (("requests", 1), ("tokens", 100)):
        newest = [pending.amounts[kind, first + hours - back] for back in range(1, minute + 2)]
        assert newest == [each] * (minute + 1)
    assert len(pending.amounts) < 5 * minute
    assert pending.ended[-1] == str(bucket)


@needs_redis
async def test_a_flushed_redis_is_told_again(routers: list[Router], redis_server: RedisServer) -> None:
    tenant = Tenant("t", Limits(requests_per_minute=300))
    answers = await asyncio.gather(*(ask(router, tenant, 0.3) for router in routers))
    spent = sum(map(sum, answers))
    redis_server.flush()
    redis_server.client().script_flush()
    await until(lambda: all(router.metric("baton_shared_state_losses_total") == 1 for router in routers))
    await asyncio.sleep(0.2)
    answers = await asyncio.gather(*(ask(router, tenant, 1.0) for router in routers))
    assert spent + sum(map(sum, answers)) == 300
    assert all(router.up for router in routers)


@needs_redis
async def test_a_password_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path, password="open sesame")
    server.start()
    secret = tmp_path / "password"
    secret.write_text("open sesame\n")
    try:
        by_file, refused = Router(server.url, str(secret)), Router(server.url)
        monkeypatch.setenv(PASSWORD_VARIABLE, "open sesame")
        by_variable = Router(server.url.replace("//", "//:wrong@"))
        for router in (by_file, refused, by_variable):
            router.state.start()
        await until(lambda: by_file.state.replicas == by_variable.state.replicas == 2)
        assert not refused.up
        for router in (by_file, refused, by_variable):
            await router.state.close()
    finally:
        server.kill()


@needs_redis
async def test_redis_and_a_router_alone_decide_alike(redis_server: RedisServer) -> None:
    store, draw = RedisStore(connect(redis_server.url, None, PATIENT_S), PATIENT_S), random.Random(4)
    seen = set()
    for number in range(300):
        limits = Limits(
            requests_per_minute=draw.choice([None, 1, 3]),
            tokens_per_minute=draw.choice([None, 50, 100]),
            concurrent=draw.choice([None, 1, 3]),
            tokens_per_day=draw.choice([None, 60, 120]),
        )
        tenant, account = Tenant(f"t{number}", limits), Account()
        for lease in map(str, range(4)):
            tokens = draw.choice([1, 20, 50, 70, 110, 130])
            decision, now = await store.admit(tenant, tokens, lease)
            assert bucket_of(now) == decision.bucket
            alone = account.decide(limits, tokens, 1, now)
            assert replace(decision, bucket=0) == alone, limits
            seen.add((decision.refused_by, decision.wait_ms < 0))
            if decision.refused_by is None:
                account.count(lease, decision.bucket, tokens, now)
    await store.close()
    never = {("tokens", True), ("quota", True)}
    assert seen == never | {(measure, False) for measure in (None, *MEASURES)}


async def test_without_a_url_one_process_counts_alone() -> None:
    router = Router(None)
    router.state.start()
    tenant = Tenant("t", Limits(requests_per_minute=7))
    assert sum(await ask(router, tenant, 0.1)) == 7
    assert not router.up
    await router.state.close()


async def test_a_tenant_without_limits_costs_nothing() -> None:
    decision, lease = await Router("redis://127.0.0.1:1/0").state.admit(Tenant(), 5)
    assert decision.refused_by is None and lease is None
