"""An open-loop client: requests come at their own times, whether or not others have been answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant that asks."""

    name: str
    key: str
    weight: float


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are seconds from when it was sent."""

    tenant: str
    sent_at: float
    status: int = 0
    head_s: float = 0.0
    """The time until the answer began, or until the request was refused."""
    first_s: float | None = None
    """The time until its first token."""
    whole_s: float | None = None
    """The time until its end; None: it broke off."""
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    """A connection that is kept open and used again."""

    transport: asyncio.Transport | None = None
    outcome: Outcome | None = None
    done: asyncio.Future[None] | None = None
    head: bytes = b""
    in_head: bool = False
    missing: int = 0
    """Missing bytes of a body whose length is known."""
    tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes, tenant: str) -> Outcome:
        assert self.transport is not None
        outcome = self.outcome = Outcome(tenant, time.monotonic())
        done = self.done = asyncio.get_running_loop().create_future()
        self.head, self.in_head, self.missing, self.tail = b"", True, -1, b""
        self.transport.write(request)
        await done
        return outcome

    def data_received(self, data: bytes) -> None:
        outcome = self.outcome
        if outcome is None:
            return
        since = time.monotonic() - outcome.sent_at
        if self.in_head:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.in_head = False
            outcome.status, outcome.head_s = int(head[9:12]), since
            lines = head.lower().split(b"\r\n")
            lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
            self.missing = lengths[0] if lengths else -1
        if self.missing >= 0:
            self.missing -= len(data)
            if self.missing <= 0:
                self._end(since)
            return
        tokens = data.count(b"data: {")
        if tokens and outcome.first_s is None:
            outcome.first_s = since
        outcome.tokens += tokens
        self.tail = (self.tail + data)[-24:]
        if b"[DONE]" in self.tail and self.tail.endswith(b"0\r\n\r\n"):
            self._end(since)

    def _end(self, since: float | None) -> None:
        if self.outcome is not None and self.done is not None and not self.done.done():
            self.outcome.whole_s = since
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._end(None)


@dataclass(slots=True)
class Arrivals:
    """Poisson arrivals of all tenants at one router, each with an equal part of them."""

    host: str
    port: int
    tenants: Sequence[Tenant]
    prompt_tokens: int
    max_tokens: int
    seed: int = 0
    idle: list[Connection] = field(default_factory=list)

    def _request(self, tenant: Tenant, number: int) -> bytes:
        prompt = [(number * 31 + at) % 4096 for at in range(self.prompt_tokens)]
        body = msgspec.json.encode(
            {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {tenant.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _one(self, tenant: Tenant, number: int) -> Outcome:
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None:
                break
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self.host, self.port)
        outcome = await connection.ask(self._request(tenant, number), tenant.name)
        if connection.transport is not None:
            self.idle.append(connection)
        return outcome

    async def run(self, per_second: float, seconds: float) -> list[Outcome]:
        """Ask for ``seconds``. Return all outcomes, when all requests have ended."""
        rng = random.Random(self.seed)
        tasks: list[asyncio.Task[Outcome]] = []
        at = began = time.monotonic()
        while at - began < seconds:
            at += rng.expovariate(per_second)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tenant = self.tenants[len(tasks) % len(self.tenants)]
            tasks.append(asyncio.create_task(self._one(tenant, len(tasks))))
        return list(await asyncio.gather(*tasks))
