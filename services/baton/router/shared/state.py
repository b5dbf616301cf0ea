"""The counts by which requests are admitted: Redis's while it answers in time, else this process's own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias, TypeVar

import msgspec
import orjson

from baton.router.shared.breaker import Breaker
from baton.router.shared.failures import StoreError
from baton.router.shared.limits import LimitDecision, Limits, Tenant, bucket_of, day_of, oldest_bucket
from baton.router.shared.redis_store import LEASE_MS, BucketDelta, RedisStore
from baton.router.shared.windows import Account
from baton.telemetry.shared import SharedStateMetrics
from baton.telemetry.supervision import Supervision

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_S = 0.25
LIFE_MS = 3000
"""The life of a router's beat. A router silent for longer is not counted as a replica, nor are its running
requests."""
SETTLE_S = 0.05
RENEW_S = LEASE_MS / 3000
CLOSE_S = 1.0
MAX_ENDED = 100_000
"""Most ended leases that wait to be sent to Redis. Older ones are dropped: they expire in Redis."""
MAX_AMOUNTS = 1000
"""Most amounts that wait to be sent to Redis. The buckets of a minute have half as many."""

Reservations: TypeAlias = Mapping[str, tuple[int, int]]
"""Worker → sequences and prompt tokens that were given to the worker and that it has not reported yet."""


_Asking: TypeAlias = asyncio.Task[tuple[LimitDecision | None, bool]]


def _nothing() -> Reservations:
    return {}


def _ignore(_: Reservations) -> None:
    pass


@dataclass(slots=True)
class _Pending:
    """The changes of one tenant that are to be sent to Redis."""

    ended: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    amounts: dict[tuple[str, int], int] = field(default_factory=dict)
    """(kind, bucket) → amount."""

    def add(self, kind: str, bucket: int, amount: int) -> None:
        if not amount:
            return
        self.amounts[kind, bucket] = self.amounts.get((kind, bucket), 0) + amount
        if len(self.amounts) > MAX_AMOUNTS:
            of_minutes = sorted((key for key in self.amounts if key[0] != "quota"), key=itemgetter(1))
            for key in of_minutes[: MAX_AMOUNTS // 4]:
                del self.amounts[key]

    def add_newer(self, other: _Pending) -> None:
        self.ended += other.ended
        for (kind, bucket), amount in other.amounts.items():
            self.add(kind, bucket, amount)


@dataclass(frozen=True, slots=True)
class Lease:
    """One admitted request, until it is settled."""

    tenant: Tenant
    name: str
    reserved: int
    bucket: int
    sure: bool = True
    """Whether it is certain that Redis has counted the request or will be told of it."""


class SharedState:
    """The shared counts, one object per router. A caller waits for at most one bounded call.

    Each process keeps an account of all that it has admitted. By its account it decides when Redis does not,
    each replica within its share of a limit. From the account, Redis is also told again what it has missed or
    lost.
    """

    def __init__(
        self,
        store: RedisStore | None,
        metrics: SharedStateMetrics,
        *,
        mine: Callable[[], Reservations] = _nothing,
        elsewhere: Callable[[Reservations], None] = _ignore,
        replicas: int = 1,
        tasks: Supervision | None = None,
    ) -> None:
        """``mine`` returns what this router has on its way to workers; ``elsewhere`` is called with the sum
        of all other routers. ``replicas``: the least number of replicas, known without Redis. ``tasks``
        supervises the two loops."""
        self.router = secrets.token_hex(8)
        self.replicas = self._least = replicas
        self._store = store
        self._metrics = metrics
        self._mine = mine
        self._elsewhere = elsewhere
        self._supervision = tasks or Supervision()
        self._breaker = Breaker()
        self._told_causes: set[str] = set()
        """The causes logged since Redis was given up. Empty while Redis answers."""
        self._offset_ms = time.time() * 1e3 - time.monotonic() * 1e3
        """Redis's clock less this process's monotonic clock, in milliseconds."""
        self._accounts: dict[str, Account] = {}
        self._pending: dict[str, _Pending] = {}
        self._memory: str | None = None
        """The identity of Redis's memory at the last beat."""
        self._number = 0
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._left: set[_Asking] = set()
        """Calls of Redis whose clients have left."""
        metrics.shared.set(store is not None)

    def start(self) -> None:
        if self._store is not None:
            keep = self._supervision.start
            self._tasks = [
                keep("shared state beat", partial(self._keep_beating, self._store)),
                keep("shared state settle", partial(self._keep_settling, self._store)),
            ]

    async def close(self) -> None:
        """Send Redis the pending changes and close its client. Takes about ``2 * CLOSE_S`` seconds at
        most."""
        self._closing = True
        if self._tasks:
            beating, settling = self._tasks
            beating.cancel()
            # Changes in running calls are kept nowhere else, and will soon arrive, unless a call hangs.
            await asyncio.wait({beating, settling, *self._left}, timeout=CLOSE_S)
            settling.cancel()
        if self._store is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    for name in [] if self._breaker.open else list(self._pending):
                        await self._settle(self._store, name, held=())
                    await self._store.close()

    @property
    def local(self) -> bool:
        """Whether this process decides by itself."""
        return self._store is None or self._breaker.open

    def now_ms(self) -> int:
        """Return the time of Redis's clock, as far as known, in milliseconds."""
        return int(time.monotonic() * 1e3 + self._offset_ms)

    # --- admission

    async def admit(self, tenant: Tenant, tokens: int) -> tuple[LimitDecision, Lease | None]:
        """Count one more request of ``tenant`` that may use ``tokens``, if its limits admit it. A lease must
        be settled, however its request ends."""
        if not tenant.limits:
            return LimitDecision(None), None
        self._number += 1
        name = f"{self.router}:{self._number}"
        decision, counted = None, False
        if self._store is not None and not self._breaker.open:
            asking = asyncio.ensure_future(self._ask(self._store, tenant, tokens, name))
            try:
                decision, counted = await asyncio.shield(asking)
            except asyncio.CancelledError:  # the client left: Redis's count is given back
                self._left.add(asking)
                asking.add_done_callback(partial(self._give_back, tenant.name, tokens, name))
                raise
        by = "redis" if decision is not None else "local"
        account = self._accounts.setdefault(tenant.name, Account())
        now = self.now_ms()
        if decision is None:
            decision = account.decide(tenant.limits, tokens, self.replicas, now)
        self._metrics.decisions.labels(tenant.name, decision.refused_by or "admitted", by).inc()
        if decision.refused_by is not None:
            if counted:  # Redis may have admitted a request that this process refuses
                self._end(tenant.name, name)
            self._note_elsewhere(account, decision, by, now)
            return decision, None
        bucket = decision.bucket if by == "redis" else bucket_of(now)
        account.count(name, bucket, tokens, now)
        self._note_elsewhere(account, decision, by, now)
        if by == "local":
            account.borrow(name, bucket, tokens, tenant.limits, self.replicas)
            if not counted:
                self._owe(tenant.name, bucket, tokens, requests=1)
        decision = replace(decision, bucket=bucket)
        return decision, Lease(tenant, name, tokens, bucket, sure=by == "redis" or not counted)

    def _note_elsewhere(self, account: Account, decision: LimitDecision, by: str, now_ms: int) -> None:
        """Remember what other replicas have used, for the time when Redis does not answer."""
        if by == "redis" and self.replicas > 1:
            account.note_elsewhere(decision, now_ms)

    async def count_request(self, tenant: Tenant) -> LimitDecision:
        """Count a request of ``tenant`` that is invalid and refused before its limits are checked. If the
        limit of requests is reached already, it is not counted, and the decision says so."""
        limit = tenant.limits.requests_per_minute
        decision, lease = await self.admit(
            replace(tenant, limits=Limits(requests_per_minute=limit)), tokens=0
        )
        if lease is not None:
            self.settle(lease, 0)
        return decision

    async def _ask(
        self, store: RedisStore, tenant: Tenant, tokens: int, name: str
    ) -> tuple[LimitDecision | None, bool]:
        """Return Redis's decision, None if it is late, and whether Redis may have counted the request."""
        began = time.monotonic()
        try:
            decision, now_ms = await store.admit(tenant, tokens, name)
        except StoreError as error:
            await self._failed(store, "admit", error)
            return None, error.unsure
        finally:
            self._metrics.delay.observe(time.monotonic() - began)
        self._worked("admit", now_ms)
        return decision, True

    def _give_back(self, tenant: str, tokens: int, name: str, asking: _Asking) -> None:
        """Undo Redis's count of a request whose client has left."""
        self._left.discard(asking)
        if asking.cancelled():
            return
        decision, counted = asking.result()
        if decision is not None and decision.refused_by is None:
            self._owe(tenant, decision.bucket, -tokens, requests=-1)
        if counted:
            self._end(tenant, name)

    def settle(self, lease: Lease, used: int) -> None:
        """End the request of ``lease``, which used ``used`` tokens. Waits for nothing."""
        name = lease.tenant.name
        difference = used - lease.reserved
        self._accounts[name].settle(lease.name, lease.bucket, difference, self.now_ms())
        self._end(name, lease.name)
        if not lease.sure:  # tokens that Redis may never have counted are not given back to it
            difference = max(0, difference)
        self._owe(name, lease.bucket, difference, requests=0)

    def _end(self, tenant: str, lease: str) -> None:
        if self._store is not None:
            self._pending.setdefault(tenant, _Pending()).ended.append(lease)

    def _owe(self, tenant: str, bucket: int, tokens: int, requests: int) -> None:
        """Queue amounts to be sent to Redis."""
        if self._store is None:
            return
        pending = self._pending.setdefault(tenant, _Pending())
        pending.add("requests", bucket, requests)
        pending.add("tokens", bucket, tokens)
        pending.add("quota", day_of(bucket), tokens)

    # --- the two loops

    async def _keep_beating(self, store: RedisStore) -> None:
        while not self._closing:
            if self._breaker.may_try(time.monotonic()):
                await self._beat(store)
            await asyncio.sleep(BEAT_S if not self._breaker.open else BEAT_S / 5)

    async def _beat(self, store: RedisStore) -> None:
        """Report that this router lives, and learn which others do. While Redis is given up, this call probes
        it."""
        try:
            beat = await store.beat(self.router, orjson.dumps(self._mine()), LIFE_MS)
        except StoreError as error:
            await self._failed(store, "beat", error)
            self._elsewhere({})
            return
        self._worked("beat", beat.now_ms)
        if self._memory is not None and self._memory != beat.memory:
            self._forgotten()
        self._memory = beat.memory
        self.replicas = max(self._least, len(beat.words))
        self._metrics.replicas.set(self.replicas)
        others = [word for name, word in beat.words.items() if name != self.router]
        self._elsewhere(_sum(others))

    def _forgotten(self) -> None:
        """Queue all counts again: Redis has lost its data, by a flush or a restart."""
        log.warning("Redis has forgotten this router: it is told again what was admitted here")
        self._metrics.losses.inc()
        oldest = oldest_bucket(self.now_ms())
        for name, account in self._accounts.items():
            pending = self._pending.setdefault(name, _Pending())
            pending.amounts.clear()
            for kind, window in (("requests", account.requests), ("tokens", account.tokens)):
                for bucket, amount in window.buckets.items():
                    if bucket >= oldest:
                        pending.add(kind, bucket, amount)
            pending.add("quota", account.day, account.day_tokens)

    async def _keep_settling(self, store: RedisStore) -> None:
        renewed = time.monotonic()
        while not self._closing:
            await asyncio.sleep(SETTLE_S)
            if self._breaker.open:
                continue
            due = time.monotonic() - renewed >= RENEW_S
            if due:
                renewed = time.monotonic()
            names = self._accounts.keys() | self._pending.keys() if due else set(self._pending)
            for name in names:
                running = self._accounts[name].running if due and name in self._accounts else ()
                await self._settle(store, name, held=tuple(running))

    async def _settle(self, store: RedisStore, name: str, held: tuple[str, ...]) -> None:
        pending = self._pending.pop(name, _Pending())
        oldest = oldest_bucket(self.now_ms())
        deltas = [
            BucketDelta(kind, bucket, amount)
            for (kind, bucket), amount in pending.amounts.items()
            if amount and (kind == "quota" or bucket >= oldest)
        ]
        if not (pending.ended or deltas or held):
            return
        try:
            await store.settle(name, pending.ended, held, deltas)
        except StoreError as error:
            await self._failed(store, "settle", error)
            if error.unsure:  # adding an amount twice is worse than never
                pending.amounts.clear()
            self._keep_pending(name, pending)
            return
        self._metrics.calls.labels("settle", "ok").inc()

    def _keep_pending(self, name: str, kept: _Pending) -> None:
        if name in self._pending:
            kept.add_newer(self._pending[name])
        self._pending[name] = kept

    def _worked(self, call: str, now_ms: int) -> None:
        self._metrics.calls.labels(call, "ok").inc()
        self._offset_ms = now_ms - time.monotonic() * 1e3
        if self._breaker.open:
            if call != "beat":  # a call begun before Redis was given up proves nothing
                return
            log.warning("Redis answers again: limits are shared")
            self._told_causes.clear()
        self._breaker.succeeded()
        self._metrics.shared.set(1)

    async def _failed(self, store: RedisStore, call: str, error: StoreError) -> None:
        self._metrics.calls.labels(call, error.word).inc()
        opened = self._breaker.failed(time.monotonic(), by_timeout=error.word == "timeout")
        if self._breaker.open:
            self._tell(error, opened)
            if error.word != "full":  # the connections of a full Redis are good
                await store.leave()
        self._metrics.shared.set(not self._breaker.open)

    def _tell(self, error: StoreError, opened: bool) -> None:
        """Log each cause once, from the time Redis is given up until it answers."""
        if error.word in self._told_causes:
            return
        self._told_causes.add(error.word)
        if opened:
            shares = "limits are local, and shared out by"
            log.warning("Redis is given up for now (%s: %s): %s %d", error.word, error, shares, self.replicas)
        else:
            log.warning("Redis is still given up, by now for another reason (%s: %s)", error.word, error)
        if error.word == "unexpected":
            log.warning("Redis: the error in full", exc_info=error)


def _sum(words: list[bytes]) -> Reservations:
    total: dict[str, tuple[int, int]] = {}
    for word in words:
        try:
            told = msgspec.json.decode(word, type=dict[str, tuple[int, int]])
        except msgspec.MsgspecError:  # the word of a router of another release
            continue
        for worker, (sequences, tokens) in told.items():
            before = total.get(worker, (0, 0))
            total[worker] = before[0] + sequences, before[1] + tokens
    return total
