"""The router's long-lived stream to one worker: dialled, greeted, read, and dialled again when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, get_args

import grpc

from baton.connector.liveness import TEMPO, Pulse, Tempo
from baton.router.placement import Role, WorkerReport
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0
GREETING_S = 5.0

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)

Stream = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]


class Watcher(Protocol):
    """Who is told of a worker."""

    def on_change(self, worker: WorkerClient) -> None:
        """The worker has become ready, or has begun to drain."""

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None: ...

    def on_lost(self, worker: WorkerClient) -> None:
        """A stream that was ready has ended, and unless the worker was ``drained``, every request on it."""

    def busy(self, worker: WorkerClient) -> bool:
        """Whether a request is open there."""


class WorkerClient:
    """One worker as the router knows it."""

    def __init__(self, address: str, router_id: str, watcher: Watcher, tempo: Tempo = TEMPO) -> None:
        self.address = address
        self.hello: pb.WorkerHello | None = None
        """None while the worker is not ready."""
        self.load = pb.Load()
        self.drained = False
        """The worker has said that everything it had is done: the end of its stream is no loss."""
        self._router_id = router_id
        self._watcher = watcher
        self._tempo = tempo
        self._pulse = Pulse(tempo)
        self._outbound: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._named: pb.DecodePeers | None = None
        """The decode workers named on this stream."""
        self._sent_sequences = 0
        self._sent_prefill_tokens = 0
        self._last_given_s = 0.0

    @property
    def ready(self) -> bool:
        return self.hello is not None

    @property
    def draining(self) -> bool:
        return self.load.draining

    @property
    def role(self) -> Role:
        if self.hello is None:
            return "both"
        name = pb.Role.Name(self.hello.role).removeprefix("ROLE_").lower()
        return next(role for role in get_args(Role) if role == name)

    def report(self) -> WorkerReport:
        """The last load report plus what was submitted since, which it cannot know of yet."""
        return WorkerReport(
            address=self.address,
            role=self.role,
            prefill_tokens=self.load.waiting_prefill_tokens + self._sent_prefill_tokens,
            sequences=self.load.running + self.load.waiting + self._sent_sequences,
            last_given_s=self._last_given_s,
        )

    def submit(self, submit: pb.Submit) -> None:
        self.count(len(submit.prompt_ids) + len(submit.output_ids))
        self._outbound.put_nowait(pb.RouterMessage(submit=submit))

    def count(self, prefill_tokens: int) -> None:
        """Count a request against this worker until its next load report."""
        self._sent_sequences += 1
        self._sent_prefill_tokens += prefill_tokens
        self._last_given_s = time.monotonic()

    def cancel(self, request_id: str, attempt: int, fork_ids: Sequence[str] = ()) -> None:
        if self.ready:
            cancel = pb.Cancel(request_id=request_id, attempt=attempt, fork_ids=fork_ids)
            self._outbound.put_nowait(pb.RouterMessage(cancel=cancel))

    def name_peers(self, peers: Iterable[pb.DecodePeer]) -> None:
        """Tell a worker that may prefill which decode workers there are, if that is news to it."""
        named = pb.DecodePeers(peers=peers)
        if self.ready and named != self._named:
            self._named = named
            self._outbound.put_nowait(pb.RouterMessage(peers=named))

    def tick(self, elapsed: float) -> None:
        """``elapsed`` seconds went by: let the worker hear of us, and give it up if it has been silent."""
        if self._reading is None:
            return
        if self._pulse.tick(elapsed):
            self._outbound.put_nowait(pb.RouterMessage(heartbeat=pb.RouterHeartbeat()))
        if self._pulse.lost(lambda: self._watcher.busy(self)):
            log.warning("worker %s is silent: its stream is closed", self.address)
            self._reading.cancel()

    async def run(self) -> None:
        """Keep a stream to the worker, for ever."""
        pause = FIRST_RETRY_S
        while True:
            try:
                await self._stream_once()
                log.info("the stream of worker %s has ended", self.address)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
                log.log(logging.WARNING if self.ready else logging.DEBUG, "%s: %s", self.address, reason)
            finally:
                self._outbound.put_nowait(None)  # grpc waits for the next message even if the stream is over
            if self.ready:
                pause = FIRST_RETRY_S
                self.hello = None
                self._watcher.on_lost(self)  # who may ask whether it was draining
                self.load = pb.Load()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_S)

    async def _stream_once(self) -> None:
        outbound = self._outbound = asyncio.Queue()
        self._sent_sequences = self._sent_prefill_tokens = 0
        self._named = None
        self.drained = False
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            outbound.put_nowait(pb.RouterMessage(hello=pb.RouterHello(router_id=self._router_id)))
            stream: Stream = pb_grpc.WorkerStub(channel).Connect(_outgoing(outbound))
            async with asyncio.timeout(GREETING_S):
                first = await stream.read()
            if not isinstance(first, pb.WorkerMessage) or not first.HasField("hello"):
                return
            self.hello = first.hello
            log.info("worker %s is ready: %s of %s", self.address, self.role, first.hello.model)
            self._watcher.on_change(self)
            await self._read_until_silent(stream)

    async def _read_until_silent(self, stream: Stream) -> None:
        """Read in a task of its own, so that silence ends the reading and not ourselves."""
        self._pulse = Pulse(self._tempo)
        self._reading = asyncio.create_task(self._read(stream), name=f"read {self.address}")
        try:
            await asyncio.wait((self._reading,))
            with suppress(asyncio.CancelledError):  # the task's, not ours
                self._reading.result()
        finally:
            self._reading.cancel()
            self._reading = None

    async def _read(self, stream: Stream) -> None:
        while isinstance(message := await stream.read(), pb.WorkerMessage):
            self._pulse.heard()
            match message.WhichOneof("message"):
                case "frame":
                    self._take(message.frame)
                case "drain_done":
                    self.drained = True
                case other:
                    log.warning("worker %s sent %s: ignored", self.address, other)

    def _take(self, frame: pb.Frame) -> None:
        begins_to_drain = frame.load.draining and not self.draining
        self.load = frame.load
        self._sent_sequences = self._sent_prefill_tokens = 0
        if begins_to_drain:
            log.info("worker %s drains", self.address)
            self._outbound.put_nowait(pb.RouterMessage(drain_noted=pb.DrainNoted()))
            self._watcher.on_change(self)
        self._watcher.on_frame(self, frame)


async def _outgoing(outbound: asyncio.Queue[pb.RouterMessage | None]) -> AsyncIterator[pb.RouterMessage]:
    while (message := await outbound.get()) is not None:
        yield message
