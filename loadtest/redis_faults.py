"""Faults of Redis while routers keep limits by it, and the outcome of the requests meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.table import Table

from tests.support.certificates import Authority
from tests.support.redis_server import RedisServer
from tests.support.ring import Ring, Service, running_routers, scrape

FAULT_S = 4.0
TOGETHER_S = 5.0
"""The time after Redis is well within which limits must be shared again, in seconds."""
PATIENCE_S = 15.0
PER_SECOND = 20.0
LOOK_S = 0.05
USER, FIRST, SECOND = "baton", "the first password", "the second password"
NOISE = ("Traceback", "never retrieved", "backward compatibility")
"""Texts that must not be in a router's log: a failure of Redis is one line of ours."""


@dataclass
class Asked:
    """The outcome of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    admitted_at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    by_router: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Fault:
    """A fault of Redis, until it is put right. Both calls may block."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    seen_as: str
    """The name by which the metrics must report the fault: a cause of `baton.router.shared.failures`, or
    ``forgotten``."""


class Way:
    """A TCP proxy that stands for a name, a Service or a proxy: connections lead to a server, and stay with
    it when the target changes. It may delay the bytes that come back."""

    def __init__(self, to: RedisServer) -> None:
        self.to = to
        self.delay_s = 0.0
        self.port = 0
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        yield
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError):
                other, back = await asyncio.open_connection(self.to.host, self.to.port)
                forward = asyncio.create_task(self._copy(reader, back, delayed=False))
                await self._copy(other, writer, delayed=True)
                forward.cancel()
                back.close()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay_s if delayed else 0)
                writer.write(data)
                await writer.drain()
        writer.close()


async def ask(client: httpx.AsyncClient, url: str, asked: Asked) -> None:
    began = time.monotonic()
    body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}
    try:
        response = await client.post(f"{url}/v1/completions", json=body)
        status = response.status_code
    except httpx.HTTPError:
        status = 0
    asked.statuses[status] += 1
    if status == 200:
        asked.admitted_at.append(began)
        asked.by_router[url] += 1
        asked.seconds.append(time.monotonic() - began)


async def load(urls: list[str], per_second: float, until: Callable[[float], bool]) -> Asked:
    """Ask the routers in turn at an even rate, whether or not they have answered, until ``until`` returns
    true for the seconds since the start."""
    asked = Asked()
    tasks: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(timeout=30) as client:
        began, number = time.monotonic(), 0
        while not until(time.monotonic() - began):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            task = asyncio.create_task(ask(client, urls[number % len(urls)], asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.gather(*tasks)
    return asked


async def try_each(faults: Sequence[Fault], rings: list[Ring], shown: Table) -> bool:
    """Try one fault after the other. Return whether all requests were answered and every other bound
    holds."""
    fine = [await _try(fault, rings, shown) for fault in faults]
    noisy = sorted({text for ring in rings for text in NOISE if text in ring.router.log.read_text()})
    if noisy:
        shown.add_row("in a router's log", ", ".join(noisy))
    return all(fine) and not noisy


async def _try(fault: Fault, rings: list[Ring], shown: Table) -> bool:
    before = await _pages(rings)
    over = asyncio.Event()
    urls = [ring.url for ring in rings]
    asking = asyncio.create_task(load(urls, PER_SECOND, lambda _: over.is_set()))
    await asyncio.sleep(1)
    await asyncio.to_thread(fault.begin)
    await asyncio.sleep(FAULT_S)
    await asyncio.to_thread(fault.end)
    together_s = await _together(rings)
    over.set()
    asked = await asking
    after = await _pages(rings)
    causes = sorted({cause for b, a in zip(before, after, strict=True) for cause in _causes(b, a)})
    failed = asked.statuses.total() - asked.statuses[200]
    late = _late(after) - _late(before)
    shown.add_row(
        f"Redis {fault.name}",
        f"{asked.statuses.total()} asked, {failed} failed; longest {1e3 * max(asked.seconds):.0f} ms, "
        f"{late:.0f} waited for Redis over 50 ms; together after {together_s:.1f} s; "
        f"seen as {', '.join(causes)}",
    )
    return not failed and not late and together_s <= TOGETHER_S and fault.seen_as in causes


async def _together(rings: list[Ring]) -> float:
    """Return the time until Redis has answered each router's sign of life and limits are shared, in
    seconds."""
    began, told = time.monotonic(), await _pages(rings)
    heard = 'baton_shared_state_calls_total{call="beat",result="ok"}'
    while (waited := time.monotonic() - began) < PATIENCE_S:
        pages = await _pages(rings)
        if all(
            page["baton_shared_state_up"] == 1 and page.get(heard, 0) > then.get(heard, 0)
            for page, then in zip(pages, told, strict=True)
        ):
            break
        await asyncio.sleep(LOOK_S)
    return waited


async def _pages(rings: list[Ring]) -> list[dict[str, float]]:
    return [await asyncio.to_thread(scrape, f"{ring.url}/metrics") for ring in rings]


def _causes(before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    """Yield the causes of a fault, as the counters that grew name them."""
    for name, value in after.items():
        if value <= before.get(name, 0.0):
            continue
        if name.startswith("baton_shared_state_losses_total"):
            yield "forgotten"
        if name.startswith("baton_shared_state_calls_total") and 'result="ok"' not in name:
            yield name.partition('result="')[2].partition('"')[0]


def _late(pages: list[dict[str, float]]) -> float:
    """Return how many admissions took longer than 50 ms."""
    name = "baton_shared_state_delay_seconds"
    return sum(page[f"{name}_count"] - page[name + '_bucket{le="0.05"}'] for page in pages)


# --- the servers, and their faults


@contextmanager
def _routers(tmp: Path, both: Service, name: str, flags: Sequence[str]) -> Iterator[list[Ring]]:
    # The limit is so high that no request is refused, by Redis or by a router.
    flags = (*flags, "--limit-requests-per-minute", "1000000")
    with running_routers(tmp, "demo", {f"{name}-a": [both], f"{name}-b": [both]}, flags) as rings:
        yield list(rings.values())


@contextmanager
def _started(*servers: RedisServer) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.kill()


async def behind_a_name(tmp: Path, both: Service, shown: Table) -> bool:
    """Run faults with two servers behind one name."""
    old, new = RedisServer(tmp), RedisServer(tmp)
    way = Way(old)

    def fail_over() -> None:
        new.follow(None)
        old.follow(new)

    def delay(seconds: float) -> Callable[[], None]:
        return lambda: setattr(way, "delay_s", seconds)

    faults = (
        Fault("stopped (SIGSTOP)", old.freeze, old.thaw, "timeout"),
        Fault("slow (200 ms)", delay(0.2), delay(0.0), "timeout"),
        Fault("flushed", old.flush, lambda: None, "forgotten"),
        Fault("full (OOM)", old.fill, old.empty, "full"),
        Fault("killed (SIGKILL)", old.kill, old.start, "connection"),
        Fault("failed over", fail_over, lambda: setattr(way, "to", new), "readonly"),
    )
    with _started(old, new):
        async with way.open():
            url = f"redis://127.0.0.1:{way.port}/0"
            return await _with_routers(
                tmp,
                both,
                "name",
                ("--redis-url", url),
                lambda rings: _in_turn(faults, new, old, rings, shown),
            )


async def _in_turn(
    faults: Sequence[Fault], new: RedisServer, old: RedisServer, rings: list[Ring], shown: Table
) -> bool:
    fine = await try_each(faults[:-1], rings, shown)
    await asyncio.to_thread(new.follow, old)
    return await try_each(faults[-1:], rings, shown) and fine


async def with_a_user(tmp: Path, both: Service, shown: Table) -> bool:
    """Run faults with a Redis user that has the rights of docs/limits.md, and a password in a file."""
    server, file = RedisServer(tmp), tmp / "redis-password"
    file.write_text(FIRST)

    def change_password() -> None:
        server.add_user(USER, SECOND)
        server.drop_clients()

    def spoil_file() -> None:
        file.write_bytes(b"\xff\xfe" + SECOND.encode())
        server.drop_clients()

    faults = (
        Fault("has another password", change_password, lambda: file.write_text(SECOND), "credentials"),
        Fault("password file not UTF-8", spoil_file, lambda: file.write_text(SECOND), "credentials"),
        Fault(
            "user without EVALSHA",
            lambda: server.add_user(USER, SECOND, "-evalsha"),
            lambda: server.add_user(USER, SECOND),
            "permission",
        ),
    )
    with _started(server):
        server.add_user(USER, FIRST)
        url = server.url.replace("//", f"//{USER}@")
        flags = ("--redis-url", url, "--redis-password-file", str(file))
        return await _with_routers(tmp, both, "user", flags, lambda rings: try_each(faults, rings, shown))


async def with_tls(tmp: Path, both: Service, shown: Table) -> bool:
    """Run faults with a certificate of a private authority."""
    authority, stranger = Authority.new(tmp / "tls"), Authority.new(tmp / "stranger")
    server = RedisServer(tmp, tls=authority)
    trusted = tmp / "trusted.crt"
    ours = authority.pair.certificate.read_bytes()
    trusted.write_bytes(ours)

    def trust_another() -> None:
        trusted.write_bytes(stranger.pair.certificate.read_bytes())
        server.drop_clients()

    faults = (
        Fault("with TLS killed", server.kill, server.start, "connection"),
        Fault("not trusted (TLS)", trust_another, lambda: trusted.write_bytes(ours), "tls"),
    )
    with _started(server):
        url = server.url.replace(str(authority.pair.certificate), str(trusted))
        return await _with_routers(
            tmp, both, "tls", ("--redis-url", url), lambda rings: try_each(faults, rings, shown)
        )


async def _with_routers(
    tmp: Path,
    both: Service,
    name: str,
    flags: Sequence[str],
    run: Callable[[list[Ring]], Awaitable[bool]],
) -> bool:
    """Run with routers that are started and ended on a thread: the connection to Redis is served by this
    loop."""
    routers = _routers(tmp, both, name, flags)
    rings = await asyncio.to_thread(routers.__enter__)
    try:
        await _together(rings)
        return await run(rings)
    finally:
        await asyncio.to_thread(routers.__exit__, None, None, None)
