"""The streams to the routers: one frame per engine step, with the tokens of all of a router's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.v1 import inference_pb2, worker_pb2

log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 4096
"""A router this far behind is cut off: it can resume its requests, and the worker's memory stays bounded."""


class RouterStream:
    """One connected router. Deltas of one event loop turn leave as one frame."""

    def __init__(self, router_id: str, load: Callable[[], worker_pb2.Load]) -> None:
        self.router_id = router_id
        self.frames: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self._load = load
        self._pending: list[worker_pb2.TokenDelta] = []

    def deliver(self, delta: worker_pb2.TokenDelta) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(delta)

    def flush(self) -> None:
        """Queue a frame with what is pending, or only the load report."""
        if self.frames.qsize() >= MAX_QUEUED_FRAMES:
            log.warning("router %s does not read its frames: cut off", self.router_id)
            self.frames.put_nowait(None)
            return
        frame = worker_pb2.Frame(deltas=self._pending, load=self._load())
        self._pending = []
        self.frames.put_nowait(worker_pb2.WorkerMessage(frame=frame))


class Routers:
    """All connected routers; ``baton.engine.outlet.Outlet``. Event loop's thread only."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    def add(self, stream: RouterStream) -> None:
        self._streams[stream.router_id] = stream

    def remove(self, stream: RouterStream) -> bool:
        """False: the router has connected again meanwhile, and the new stream stays."""
        if self._streams.get(stream.router_id) is not stream:
            return False
        del self._streams[stream.router_id]
        return True

    def connected(self, owner: str) -> bool:
        return owner in self._streams

    def deliver(self, owner: str, delta: worker_pb2.TokenDelta) -> None:
        stream = self._streams.get(owner)
        if stream is not None:
            stream.deliver(delta)

    def fail(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        delta = worker_pb2.TokenDelta(
            request_id=request_id,
            attempt=attempt,
            finish_reason=inference_pb2.FINISH_REASON_ERROR,
            error=reason,
        )
        self.deliver(owner, delta)

    def send_loads(self) -> None:
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.frames.put_nowait(None)
