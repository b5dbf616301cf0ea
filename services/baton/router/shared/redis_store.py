"""The scripts in Redis, each call bounded in time and each failure by one of a few names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakSet

import orjson

from baton.options import ConfigError, StartError
from baton.router.shared.limits import BUCKET_MS, MEASURES, WINDOW_MS, Decision, Room, Tenant

if TYPE_CHECKING:
    from redis.asyncio import Redis

PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD"
LEASE_MS = 15_000
"""Of a request under way, renewed every third of it; that of a router that died ends."""
CONNECTIONS = 32


class StoreError(Exception):
    """Redis did not do it. ``word`` is timeout, connection, full or refused."""

    def __init__(self, word: str, message: str, *, unsure: bool = False) -> None:
        """``unsure``: it may have done it all the same, and the answer was late."""
        super().__init__(message)
        self.word = word
        self.unsure = unsure


@dataclass(frozen=True, slots=True)
class Delta:
    """An amount to add to a bucket of a tenant (of the quota: to a day)."""

    kind: str
    bucket: int
    amount: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What came back for a sign of life."""

    now_ms: int
    memory: str
    """Another than before: Redis has lost what it was told."""
    words: dict[str, bytes]
    """What each living router says, this one included."""


def check_url(url: str) -> None:
    """Raises ConfigError unless it is one of Redis, without saying what is in it."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("redis", "rediss") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError("redis_url", "is no address of Redis; write it like rediss://host:6379/0")


def connect(url: str, password_file: str | None, timeout_s: float) -> Redis:
    """A client that connects when it is used. A password in a file is read for each connection."""
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.credentials import CredentialProvider
    except ImportError as error:
        raise StartError(f"--redis-url needs the package redis: {error}") from None

    parts = urlsplit(url)
    user = parts.username

    class Password(CredentialProvider):
        def get_credentials(self) -> tuple[str] | tuple[str, str]:
            if password_file is not None:
                secret = Path(password_file).read_text().strip()
            else:
                secret = os.environ[PASSWORD_VARIABLE]
            return (user, secret) if user else (secret,)

    class Pool(BlockingConnectionPool):
        """Knows whose calls have got a connection: of the others Redis cannot have heard."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.served: WeakSet[asyncio.Future[object]] = WeakSet()

        async def get_connection(self, *about: Any, **options: Any) -> Any:
            connection = await super().get_connection(*about, **options)  # type: ignore[no-untyped-call]
            task = asyncio.current_task()
            assert task is not None
            self.served.add(task)
            return connection

    given = password_file is not None or PASSWORD_VARIABLE in os.environ
    if given:  # that of the URL does not count
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=host))
    pool = Pool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),  # trying again is the breaker's affair
        protocol=2,
        **({"credential_provider": Password()} if given else {}),
    )
    return Redis(connection_pool=pool)


class RedisStore:
    """The tenants' counts and the routers' words in one Redis."""

    def __init__(self, client: Redis, timeout_s: float, prefix: str = "baton") -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._calls: set[asyncio.Future[object]] = set()
        self._served: WeakSet[asyncio.Future[object]] = client.connection_pool.served  # type: ignore[attr-defined]
        here = files(__package__)
        self._admit, self._settle, self._beat = (
            client.register_script((here / f"{name}.lua").read_text()) for name in ("admit", "settle", "beat")
        )

    async def admit(self, tenant: Tenant, tokens: int, lease: str) -> tuple[Decision, int]:
        """The decision, and Redis's time in ms. Raises StoreError."""
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
        decision = Decision(
            MEASURES[refused - 1] if refused else None,
            wait,
            _room(limits.requests_per_minute, requests, requests_reset),
            _room(limits.tokens_per_minute, used, tokens_reset),
            bucket,
        )
        return decision, now

    async def settle(
        self, tenant: str, ended: Sequence[str], held: Sequence[str], deltas: Sequence[Delta]
    ) -> None:
        """Raises StoreError."""
        told = [[each.kind, each.bucket, each.amount] for each in deltas]
        lists = [orjson.dumps(each) for each in (list(ended), list(held), told)]
        await self._call(self._settle, self._keys(tenant), [LEASE_MS, BUCKET_MS, WINDOW_MS, *lists])

    async def beat(self, router: str, words: bytes, life_ms: int) -> Beat:
        """Raises StoreError."""
        keys = [f"{{{self._prefix}:routers}}:{name}" for name in ("ends", "words", "memory")]
        reply = await self._call(self._beat, keys, [router, words, life_ms])
        now, memory, flat = cast(tuple[int, bytes, list[bytes]], reply)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return Beat(now, memory.decode(), {name.decode(): word for name, word in pairs})

    async def close(self) -> None:
        await self._client.aclose()

    def _keys(self, tenant: str) -> list[str]:
        # The braces keep a tenant's keys on one node of a cluster.
        names = ("requests", "tokens", "leases", "days")
        return [f"{{{self._prefix}:tenant:{tenant}}}:{name}" for name in names]

    async def _call(self, script: object, keys: list[str], args: list[object]) -> object:
        return await self._bounded(script(keys=keys, args=args))  # type: ignore[operator]

    async def _bounded(self, call: object) -> object:
        from redis import exceptions

        # In a task of its own, which is left to itself when its time is up: the client takes as long again to
        # clean up after a call that is cancelled.
        task = asyncio.ensure_future(call)  # type: ignore[call-overload]
        self._calls.add(task)
        task.add_done_callback(self._over)
        try:
            done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
            if not done:
                raise TimeoutError
            return task.result()
        except (TimeoutError, exceptions.TimeoutError) as error:
            message = f"no answer within {1e3 * self._timeout_s:.0f} ms"
            raise StoreError("timeout", message, unsure=task in self._served) from error
        except (exceptions.ConnectionError, OSError) as error:
            raise StoreError("connection", str(error)) from error
        except exceptions.RedisError as error:
            full = isinstance(error, exceptions.OutOfMemoryError) or "OOM" in str(error)
            raise StoreError("full" if full else "refused", str(error)) from error
        finally:
            task.cancel()

    def _over(self, task: asyncio.Future[object]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits has it; otherwise it is nobody's


def _room(limit: int | None, used: int, reset_ms: int) -> Room | None:
    return None if limit is None else Room(limit, max(0, limit - used), reset_ms)
