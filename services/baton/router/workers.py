"""The router's long-lived stream to one worker: dialled, greeted, read, and dialled again when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import get_args

import grpc

from baton.router.placement import Role, WorkerReport
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0
GREETING_S = 5.0
SILENCE_S = 5.0
"""A worker reports its load every second; one silent for this long is taken for dead."""

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


class WorkerClient:
    """One worker as the router knows it.

    ``on_frame`` gets every frame; ``on_lost`` is called when a stream that was ready has ended, and every
    request on it with it.
    """

    def __init__(
        self,
        address: str,
        router_id: str,
        on_frame: Callable[[WorkerClient, pb.Frame], None],
        on_lost: Callable[[WorkerClient], None],
    ) -> None:
        self.address = address
        self.hello: pb.WorkerHello | None = None
        """None while the worker is not ready."""
        self.load = pb.Load()
        self._router_id = router_id
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._outbound: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._sent_sequences = 0
        self._sent_prefill_tokens = 0

    @property
    def ready(self) -> bool:
        return self.hello is not None

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
        )

    def submit(self, submit: pb.Submit) -> None:
        self.count(len(submit.prompt_ids) + len(submit.output_ids))
        self._outbound.put_nowait(pb.RouterMessage(submit=submit))

    def count(self, prefill_tokens: int) -> None:
        """Count a request against this worker until its next load report."""
        self._sent_sequences += 1
        self._sent_prefill_tokens += prefill_tokens

    def cancel(self, request_id: str, attempt: int) -> None:
        if self.ready:
            cancel = pb.Cancel(request_id=request_id, attempt=attempt)
            self._outbound.put_nowait(pb.RouterMessage(cancel=cancel))

    async def run(self) -> None:
        """Keep a stream to the worker, for ever."""
        pause = FIRST_RETRY_S
        while True:
            try:
                await self._stream_once()
                log.info("worker %s ended its stream", self.address)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
                log.log(logging.WARNING if self.ready else logging.DEBUG, "%s: %s", self.address, reason)
            if self.ready:
                pause = FIRST_RETRY_S
                self.hello = None
                self._on_lost(self)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_S)

    async def _stream_once(self) -> None:
        outbound = self._outbound = asyncio.Queue()
        self._sent_sequences = self._sent_prefill_tokens = 0
        outbound.put_nowait(pb.RouterMessage(hello=pb.RouterHello(router_id=self._router_id)))
        try:
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                stream: Stream = pb_grpc.WorkerStub(channel).Connect(_drain(outbound))
                async with asyncio.timeout(GREETING_S):
                    first = await stream.read()
                if not isinstance(first, pb.WorkerMessage) or not first.HasField("hello"):
                    return
                self.hello = first.hello
                log.info("worker %s is ready: %s of %s", self.address, self.role, first.hello.model)
                await self._read(stream)
        finally:
            outbound.put_nowait(None)  # or grpc would wait for the next message of a stream that has ended

    async def _read(self, stream: Stream) -> None:
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await stream.read()
            if not isinstance(message, pb.WorkerMessage):
                return
            if message.HasField("frame"):
                self.load = message.frame.load
                self._sent_sequences = self._sent_prefill_tokens = 0
                self._on_frame(self, message.frame)


async def _drain(outbound: asyncio.Queue[pb.RouterMessage | None]) -> AsyncIterator[pb.RouterMessage]:
    while (message := await outbound.get()) is not None:
        yield message
