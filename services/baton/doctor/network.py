"""Ports that services listen on, and the router and Redis that they are to reach."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from baton.doctor.finding import Finding, lack, ok
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted
from baton.greeting.cluster_key import HOW, MIN_BYTES, is_loopback, suffices
from baton.net import sockets
from baton.process.fields import options_of
from baton.process.options import UserError, join_address
from baton.router.config import RouterConfig
from baton.router.shared.redis_store import check_url, connect
from baton.worker.config import WorkerConfig

_LISTENING = "0A"
_SKEW_S = 2.0
"""The most that two clocks may be apart: the header that tells a router's has whole seconds."""
_SYNCHRONIZE = "have chrony or systemd-timesyncd synchronize the clocks of both nodes"


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The ports, the router and Redis."""
    yield from _cluster_key(wanted.host)
    for port in wanted.ports or _default_ports(wanted):
        yield _port(machine, wanted.host, port)
    if wanted.router is not None:
        yield from _router(wanted.router, wanted.timeout)
    if wanted.redis is not None:
        yield from _redis(wanted.redis, wanted.timeout)


def _cluster_key(host: str) -> Iterator[Finding]:
    """The key by which services know each other, where others than this machine reach them."""
    if is_loopback(host):
        return
    variable = next(one.option.env for one in options_of(WorkerConfig) if one.field == "cluster_key")
    if suffices(os.environ.get(variable or "", "")):
        yield ok("cluster key", "is given")
    else:
        says = f"{variable} has less than {MIN_BYTES} bytes, and services on {host} need it"
        yield lack("cluster key", says, f"{HOW}; or use 127.0.0.1")


def _default_ports(wanted: Wanted) -> tuple[int, ...]:
    """The ports that the services listen on unless told otherwise. Workers' are picked by the system."""
    if not wanted.routes:
        return ()
    declared = {one.field: one.default for one in options_of(RouterConfig)}
    return tuple(port for name in ("port", "grpc_port") if isinstance(port := declared[name], int))


def _port(machine: Machine, host: str, port: int) -> Finding:
    name = f"port {port}"
    try:
        sockets.listen(host, port).close()
    except OSError as error:
        where = join_address(host, port)
        if error.errno == errno.EADDRINUSE:
            says = f"{where} is taken by {_holder(machine, port)}"
            return lack(name, says, "end that process, or give the service another port")
        do = "give the service a port from 1024 on, and a host that is this machine's"
        return lack(name, f"{where} cannot be listened on: {error.strerror}", do)
    return ok(name, f"free on {host}")


def _holder(machine: Machine, port: int) -> str:
    """The process that listens on a port, in words. Its arguments, which may hold keys, are not told."""
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for line in machine.read(f"/proc/net/{table}").splitlines()[1:]
        if (fields := line.split())[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port
    }
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in machine.path("/proc").glob("[0-9]*"):
        try:
            held = any(str(link.readlink()) in links for link in (process / "fd").iterdir())
        except OSError:
            continue  # another user's, or it has ended
        if held:
            return f"process {process.name} ({machine.read(f'/proc/{process.name}/comm').strip()})"
    return "a process that this user cannot see"


def _router(url: str, timeout_s: float) -> Iterator[Finding]:
    do = (
        "see that a router runs there (baton router, baton up), and that a network policy or proxy lets it by"
    )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield lack("router", f"{url} is no address", "write it like http://127.0.0.1:8000")
        return
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    began = time.monotonic()
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException) as error:
        yield lack("router", f"{url} does not answer: {error or type(error).__name__}", do)
        return
    finally:
        connection.close()
    took = 1e3 * (time.monotonic() - began)
    if answer.status == 200:
        yield ok("router", f"{url} answers after {took:.0f} ms, and can place requests")
    else:
        says = f"{url} answers with {answer.status}: it cannot place requests"
        yield lack("router", says, "see which workers it has: baton top --router, and its log")
    yield from _skew_to_router(dict(answer.getheaders()))


def _skew_to_router(headers: Mapping[str, str]) -> Iterator[Finding]:
    told = {name.lower(): value for name, value in headers.items()}.get("date")
    if told is not None:
        yield _skew("clock of the router", parsedate_to_datetime(told).timestamp() - time.time())


def _skew(name: str, seconds: float) -> Finding:
    if abs(seconds) <= _SKEW_S:
        return ok(name, f"as this machine's, to within {_SKEW_S:g} s")
    way = "ahead of" if seconds > 0 else "behind"
    return lack(name, f"{abs(seconds):.0f} s {way} this machine's", _SYNCHRONIZE)


def _redis(url: str, timeout_s: float) -> Iterator[Finding]:
    do = (
        "see that Redis runs there, with this password (BATON_REDIS_PASSWORD), and that this pod may reach it"
    )
    began = time.monotonic()
    try:
        check_url(url)
        now = asyncio.run(_time_of_redis(url, timeout_s))
    except UserError as error:
        yield lack(
            "Redis", str(error).replace("--redis-url", "--redis"), "write it like rediss://host:6379/0"
        )
        return
    except Exception as error:  # noqa: BLE001 (the client's own kinds, of which none may end the report)
        yield lack("Redis", f"does not answer: {error or type(error).__name__}", do)
        return
    yield ok("Redis", f"answers after {1e3 * (time.monotonic() - began):.0f} ms")
    yield _skew("clock of Redis", now - time.time())


async def _time_of_redis(url: str, timeout_s: float) -> float:
    client = connect(url, None, timeout_s)
    try:
        seconds, microseconds = await client.time()
    finally:
        await client.aclose()
    return float(seconds) + 1e-6 * float(microseconds)
