"""The HTTP API on a real server and a loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from baton.router.api.http.app import create_app
from baton.router.api.http.server.http_server import HttpServer
from baton.router.api.http.server.slots import ConnectionSlots, SlotLimits
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import Ring
from baton.telemetry.http import HttpMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.supervision import Supervision
from baton.text.tokenizer import Tokenizer


class _Server(HttpServer):
    """Is told of its end, where uvicorn looks every tenth of a second."""

    def __init__(self, config: uvicorn.Config, slots: ConnectionSlots) -> None:
        super().__init__(config, slots, Supervision())
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()


@asynccontextmanager
async def serving(
    ring: Ring,
    tokenizer: Tokenizer,
    settings: ApiSettings | None = None,
    metrics: RouterMetrics | None = None,
) -> AsyncIterator[str]:
    """Serves while the context is open; gives the base URL."""
    async with serving_app(create_app(ring, tokenizer, settings, metrics)) as url:
        yield url


@asynccontextmanager
async def serving_app(
    app: Starlette,
    *,
    send_buffer: int | None = None,
    limits: SlotLimits | None = None,
    http: HttpMetrics | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Likewise, for an application that is there already. ``send_buffer``: of the kernel, in bytes;
    ``limits`` and ``http``: of its connections, and what is counted of them."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, ws="none")
    config.load()
    config.ssl = tls
    slots = ConnectionSlots(
        limits or SlotLimits(total=1000, per_address=1000), http or HttpMetrics(CollectorRegistry())
    )
    server = _Server(config, slots)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.ending.set()
        await task


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait until ``condition`` holds; fail when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any condition will do
            await asyncio.sleep(0.005)
