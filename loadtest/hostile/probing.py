"""Strangers that deny others what needs no key, or fill a log: probes of health, and the audit log."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtest.hostile.vocabulary import Attack, Felt, Found, Setup, Target, Watched
from loadtest.hostile.wire import ask, loopback, request

CHECK = "/grpc.health.v1.Health/Check"
CONNECTIONS, WATCHES = 4, 64
SILENT = 60
CHECKS = 20
CHECK_S = 5.0
DENIED_S = 1.0
TIMES = 5.0
"""The ratio to the calm at which a health check is as good as denied, where it takes over ``DENIED_S``."""
REQUESTS = 500
LINE_BYTES = 20
"""The bytes of audit log for each request that a stranger may not cause."""
_OWN = (("grpc.use_local_subchannel_pool", 1),)


async def watch_health(target: Target, found: Found) -> None:
    """Open watches on four connections and checks that send no message; and check the health honestly,
    before and meanwhile."""
    loopback(target.grpc)
    async with AsyncExitStack() as stack:
        honest = await stack.enter_async_context(grpc.aio.insecure_channel(target.grpc, options=_OWN))
        await _check(honest, found, "calm_s")
        found.figures["failed"] = 0
        silent = await stack.enter_async_context(grpc.aio.insecure_channel(target.grpc, options=_OWN))
        for _ in range(CONNECTIONS):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target.grpc, options=_OWN))
            for _ in range(WATCHES):
                stack.push_async_callback(_ended, asyncio.create_task(_watch(channel)))
        calls = [silent.stream_stream(CHECK, None, None)(None) for _ in range(SILENT)]
        for call in calls:
            stack.callback(call.cancel)
        await asyncio.sleep(1.0)
        await _check(honest, found, "attacked_s")


async def _watch(channel: grpc.aio.Channel) -> None:
    with suppress(grpc.aio.AioRpcError):
        async for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            pass


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _check(channel: grpc.aio.Channel, found: Found, figure: str) -> None:
    """Check the health, and note the longest time of all but one."""
    took = []
    for _ in range(CHECKS):
        began = time.monotonic()
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CHECK_S)
            found.count("checked")
        except grpc.aio.AioRpcError as error:
            found.count(error.code().name)
            found.figures["failed"] = found.figure("failed") + 1
        took.append(time.monotonic() - began)
        found.figures[figure] = round(sorted(took)[-2:][0], 4)
        await asyncio.sleep(0.05)


def _denied(found: Found, watched: Watched, felt: Felt) -> bool:
    slow = found.figure("attacked_s") > max(DENIED_S, TIMES * found.figure("calm_s"))
    return found.figure("failed") > 0 or slow


async def fill_audit(target: Target, found: Found) -> None:
    """Ask without a key, by names as long as they may be."""
    audit = Path(target.router_log).parent / "audit"
    headers = {"x-request-id": "r" * 128}
    for _ in range(REQUESTS):
        sent = request("/v1/completions", b"{}", headers=headers)
        found.count((await ask(target.http, sent, wait_s=10)).ending)
        found.figures["requests"] = found.figure("requests") + 1
    await asyncio.sleep(1.5)
    grew = await asyncio.to_thread(_strangers_bytes, audit)
    found.figures["bytes_each"] = round(grew / REQUESTS, 1)


def _strangers_bytes(path: Path) -> int:
    """Return the bytes of lines that have no tenant: those of the honest ones go on meanwhile."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return sum(len(line) for line in lines if b'"tenant":null' in line)


def _filled(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("bytes_each") > LINE_BYTES


ATTACKS = (
    Attack(
        name="health-watch",
        finding="",
        aim="an honest health check over gRPC fails or takes over a second",
        run=watch_health,
        reached=_denied,
        max_s=60,
    ),
    Attack(
        name="audit-lines",
        finding="",
        aim=f"{LINE_BYTES} bytes of audit log for each request without a key",
        run=fill_audit,
        reached=_filled,
        setup=Setup(router=("--audit-log", "{tmp}/audit")),
        max_s=40,
    ),
)
