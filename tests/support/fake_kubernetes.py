"""An API server that has EndpointSlices and nothing else, and that fails in all the ways that real ones do.

The real client talks HTTP to it. ``factor`` makes its clock run faster: a watch that asks for 2 s lasts 2 s
divided by it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from kubernetes.aio.client import Configuration

from baton.router.discovery.api_server import ApiServer
from baton.router.discovery.slices import ROLE_LABEL

NAMESPACE = "serving"
PORT_NAME = "grpc"
MAX_FAILING_LISTS = 2
"""In a row. A server that never answers is not one to converge with."""

Slice = dict[str, Any]
ListFault = Literal["500", "504", "410", "429", "stall", "drop", "malformed"]
WatchFault = Literal["410", "410 event", "500", "stall", "drop", "malformed", "early"]


@dataclass(eq=False)
class Watch:
    """One that is open."""

    response: web.StreamResponse
    transport: asyncio.Transport
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    stalled: bool = False

    def send(self, kind: str, what: Slice) -> None:
        if not self.stalled:
            self.queue.put_nowait(json.dumps({"type": kind, "object": what}).encode() + b"\n")


class FakeKubernetes:
    """State, its history, and the faults that are to come."""

    def __init__(self, factor: float = 1.0, token: str | None = None, selector: str = ROLE_LABEL) -> None:
        self.factor = factor
        self.token = token
        self.selector = selector
        """The one that is to be asked with."""
        self.slices: dict[str, Slice] = {}
        self.list_faults: list[ListFault] = []
        """Of the lists to come, the first first."""
        self.watch_faults: list[WatchFault] = []
        self.losing = 0
        """Events to come that nobody is sent."""
        self.lists = self.watches = 0
        """Asked for so far."""
        self.away = False
        """Every request gets a connection that breaks."""
        self.url = ""
        self._version = 100
        self._history: list[tuple[int, str, Slice]] = []
        self._open: set[Watch] = set()
        self._failed_lists = 0

    # --- the cluster

    def put(
        self,
        name: str,
        endpoints: list[Slice],
        role: str = "decode",
        labels: dict[str, str] | None = None,
        **fields: object,
    ) -> None:
        """Create or replace a slice. ``labels``: instead of the role's alone."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._version += 1
        self.slices[name] = {
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "resourceVersion": str(self._version),
                "labels": labels or {ROLE_LABEL: role},
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "metrics", "port": 9100}, {"name": PORT_NAME, "port": 9000}],
            **fields,
        }
        self._tell(kind, self.slices[name])

    def delete(self, name: str) -> None:
        self._version += 1
        gone = self.slices.pop(name)
        gone["metadata"] = {**gone["metadata"], "resourceVersion": str(self._version)}
        self._tell("DELETED", gone)

    def _tell(self, kind: str, what: Slice) -> None:
        if self.losing:
            self.losing -= 1
            return
        self._history.append((self._version, kind, what))
        for watch in self._open:
            watch.send(kind, what)

    # --- faults of what is open

    def repeat(self, events: int = 3) -> None:
        """Send the last events again, the oldest last."""
        for _, kind, what in reversed(self._history[-events:]):
            for watch in self._open:
                watch.send(kind, what)

    def compact(self) -> None:
        """Forget the history: whoever watches from before gets a 410."""
        self._history.clear()
        self.each(lambda watch: watch.send("ERROR", _status(410, "Expired")))

    def drop(self) -> None:
        self.each(lambda watch: watch.transport.abort())

    def stall(self) -> None:
        """Nothing is ever sent on what is open now, and nothing tells that."""
        self.each(lambda watch: setattr(watch, "stalled", True))

    def each(self, do: Callable[[Watch], object]) -> None:
        for watch in list(self._open):
            do(watch)

    # --- serving

    async def get(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return await self._fail(request, "drop")
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response(_status(401, "Unauthorized"), status=401)
        if request.query.get("labelSelector") != self.selector:
            return web.json_response(_status(400, "another selector was expected"), status=400)
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request)
        return await self._list(request)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self.lists += 1
        if self.list_faults and self._failed_lists < MAX_FAILING_LISTS:
            self._failed_lists += 1
            return await self._fail(request, self.list_faults.pop(0))
        self._failed_lists = 0
        items = list(self.slices.values())
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _fail(self, request: web.Request, fault: str) -> web.StreamResponse:
        if fault == "stall":
            await asyncio.sleep(60)
        if fault in ("stall", "drop"):
            if request.transport is not None:  # the client may have given up
                request.transport.abort()
            return web.Response()
        if fault == "malformed":
            return web.Response(body=b'{"metadata": {', content_type="application/json")
        return web.json_response(_status(int(fault), fault), status=int(fault))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        fault = self.watch_faults.pop(0) if self.watch_faults else None
        if fault in ("410", "500", "drop", "malformed"):
            return await self._fail(request, fault)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        if fault == "early":
            return response
        watch = Watch(response, transport, stalled=fault == "stall")
        since = int(request.query["resourceVersion"])
        for version, kind, what in self._history:
            if version > since:
                watch.send(kind, what)
        if fault == "410 event":
            watch.send("ERROR", _status(410, "Expired"))
        self._open.add(watch)
        try:
            await self._stream(watch, int(request.query["timeoutSeconds"]) / self.factor)
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            self._open.discard(watch)
        return response

    async def _stream(self, watch: Watch, seconds: float) -> None:
        watch.send("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})
        async with asyncio.timeout(seconds):
            while True:
                line = await watch.queue.get()
                if line is not None:
                    await watch.response.write(line)

    def api(self) -> ApiServer:
        """The client's side, with this server's credentials as they are when it connects."""

        async def connect() -> Configuration:
            configuration = Configuration(host=self.url)
            if self.token is not None:
                configuration.api_key["BearerToken"] = f"Bearer {self.token}"
            return configuration

        return ApiServer(connect, NAMESPACE, ROLE_LABEL)


def pod(address: str, uid: str = "", **conditions: bool | None) -> Slice:
    """An endpoint of a slice."""
    given = {name: value for name, value in conditions.items() if value is not None}
    return {
        "addresses": [address],
        "conditions": given,
        "targetRef": {"kind": "Pod", "uid": uid or address},
        "zone": "z1",
    }


def _status(code: int, message: str) -> Slice:
    return {"kind": "Status", "code": code, "reason": message, "message": message}


@asynccontextmanager
async def serving(server: FakeKubernetes) -> AsyncIterator[FakeKubernetes]:
    app = web.Application()
    app.router.add_get(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", server.get)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
