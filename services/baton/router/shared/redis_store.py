"""The calls of the scripts in Redis, each bounded in time, and each failing with one of a few causes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.resources import files
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from baton.process.options import ConfigError, StartError
from baton.router.shared.failures import StoreError, cause_of, store_error
from baton.router.shared.limits import BUCKET_MS, MEASURES, WINDOW_MS, LimitDecision, RemainingLimit, Tenant

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from baton.router.shared.redis_client import Pool

P = ParamSpec("P")
T = TypeVar("T")

LEASE_MS = 15_000
"""The life of a lease. The lease of a running request is renewed every third of it; leases of a dead router
expire."""


@dataclass(frozen=True, slots=True)
class BucketDelta:
    """An amount to add to a bucket of a tenant; of the quota, to a day."""

    kind: str
    bucket: int
    amount: int


@dataclass(frozen=True, slots=True)
class BeatReply:
    """The reply to a router's beat."""

    now_ms: int
    memory: str
    """The identity of Redis's memory. When it changes, Redis has lost its data."""
    words: dict[str, bytes]
    """The word of each living router, this one included."""


def check_url(url: str) -> None:
    """Raises ConfigError, which quotes nothing of it, unless ``url`` is a URL of Redis."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("redis", "rediss") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError("redis_url", "is no address of Redis; write it like rediss://host:6379/0")


def connect(url: str, password_file: str | None, timeout_s: float) -> Redis:
    """Return a client that connects when it is used. Raises StartError if the package is missing, and
    ConfigError if ``url`` has options that a connection cannot have."""
    try:
        from baton.router.shared.redis_client import client_of
    except ImportError as error:
        raise StartError(f"--redis-url needs the package redis: {error}") from None
    return client_of(url, password_file, timeout_s)


def _named(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return ``call`` with every error turned into a StoreError, so that no request fails by a failure of
    Redis."""

    @wraps(call)
    async def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except StoreError:
            raise
        except Exception as error:
            raise store_error(error) from error

    return named


class RedisStore:
    """The tenants' counts and the routers' words in one Redis."""

    def __init__(self, client: Redis, timeout_s: float, prefix: str = "baton") -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._calls: set[asyncio.Future[object]] = set()
        self._pool = cast("Pool", client.connection_pool)
        here = files(__package__)
        self._admit, self._settle, self._beat = (
            client.register_script((here / f"{name}.lua").read_text()) for name in ("admit", "settle", "beat")
        )

    @_named
    async def admit(self, tenant: Tenant, tokens: int, lease: str) -> tuple[LimitDecision, int]:
        """Count a request if the tenant's limits admit it. Returns the decision, and Redis's time in
        milliseconds. Raises StoreError."""
        limits = tenant.limits
        reply = await self._call(
            self._admit,
            self._keys(tenant.name),
            [
                *(-1 if limit is None else limit for limit in limits.in_order()),
                *(tokens, lease, LEASE_MS, BUCKET_MS, WINDOW_MS),
            ],
        )
        refused, wait, requests, requests_reset, used, tokens_reset, now, bucket = cast(list[int], reply)
        decision = LimitDecision(
            MEASURES[refused - 1] if refused else None,
            wait,
            _room(limits.requests_per_minute, requests, requests_reset),
            _room(limits.tokens_per_minute, used, tokens_reset),
            bucket,
        )
        return decision, now

    @_named
    async def settle(
        self, tenant: str, ended: Sequence[str], held: Sequence[str], deltas: Sequence[BucketDelta]
    ) -> None:
        """End leases, renew ``held`` leases, and add amounts. Raises StoreError."""
        told = [[each.kind, each.bucket, each.amount] for each in deltas]
        lists = [orjson.dumps(each) for each in (list(ended), list(held), told)]
        await self._call(self._settle, self._keys(tenant), [LEASE_MS, BUCKET_MS, WINDOW_MS, *lists])

    @_named
    async def beat(self, router: str, words: bytes, life_ms: int) -> BeatReply:
        """Report that ``router`` lives, with its word for the others. Raises StoreError."""
        keys = [f"{{{self._prefix}:routers}}:{name}" for name in ("ends", "words", "memory")]
        reply = await self._call(self._beat, keys, [router, words, life_ms])
        now, memory, flat = cast(tuple[int, bytes, list[bytes]], reply)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return BeatReply(now, memory.decode(), {name.decode(): word for name, word in pairs})

    async def leave(self) -> None:
        """Drop all connections: the next call dials the host's address of that time. After a failover, open
        connections lead to a replica, or nowhere."""
        await self._pool.leave()

    async def close(self) -> None:
        await self._client.aclose()
        await self._pool.aclose()

    def _keys(self, tenant: str) -> list[str]:
        # The braces keep a tenant's keys on one node of a cluster.
        names = ("requests", "tokens", "leases", "days")
        return [f"{{{self._prefix}:tenant:{tenant}}}:{name}" for name in names]

    async def _call(self, script: object, keys: list[str], args: list[object]) -> object:
        return await self._bounded(script(keys=keys, args=args))  # type: ignore[operator]

    async def _bounded(self, call: object) -> object:
        # The call has a task of its own, which is not awaited when its time is up: the client takes as long
        # again to clean up after a call that is cancelled.
        task = asyncio.ensure_future(call)  # type: ignore[call-overload]
        self._calls.add(task)
        task.add_done_callback(self._over)
        try:
            done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
            if done:
                return task.result()
        except Exception as error:
            if cause_of(error) != "timeout":
                raise
        finally:
            task.cancel()
        message = f"no answer within {1e3 * self._timeout_s:.0f} ms"
        raise StoreError("timeout", message, unsure=task in self._pool.served)

    def _over(self, task: asyncio.Future[object]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: if no caller waits any more, asyncio must not log it


def _room(limit: int | None, used: int, reset_ms: int) -> RemainingLimit | None:
    return None if limit is None else RemainingLimit(limit, max(0, limit - used), reset_ms)
