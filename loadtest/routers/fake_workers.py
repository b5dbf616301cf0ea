"""Hundreds of workers in one process, which only talk: every step a frame with a token for each request.

    python -m loadtest.routers.fake_workers --workers 256 --step-ms 200 --record tokens.txt

When the router is measured, its workers must not be short of the core that they share with the client. These
workers compute nothing, keep no KV blocks and admit every request; their messages on the wire are those of
real workers. The steps of the workers are spread evenly over the time of one. Their plain API, for the same
load without a router, is as small: any request is a stream of ``max_tokens`` events.

Prints the addresses, one line for each worker: of the Worker service, and of the plain API.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import cast

import grpc
import uvloop

from baton import hub
from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Called
from baton.net.heartbeat import NO_PROBES
from baton.net.message_parts import Joiner
from baton.text.digest import NO_TOKENIZER
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

CLUSTER_KEY = "BATON_CLUSTER_KEY"
MAX_BYTES = 16 << 20
"""Most bytes of a router's message, all its parts together."""
TEXT = "What is a KV block? A block holds the keys and values of some tokens of a sequence. "
_LENGTH = re.compile(rb'"max_tokens":\s*(\d+)')
_BODY = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True, eq=False)
class Seat:
    """A request under way."""

    name: str
    left: int
    attempt: int = 0
    said: int = 0
    client: asyncio.Transport | None = None
    """The client of the plain API; None: the token goes to the router's stream."""


@dataclass(eq=False)
class Worker(pb_grpc.WorkerServicer):
    """One worker, and its plain API."""

    token_ids: list[int]
    vocab_size: int
    record: TextIOWrapper
    seats: dict[str, Seat] = field(default_factory=dict)
    frames: asyncio.Queue[pb.WorkerMessage] | None = None
    """The frames to the one router."""
    taken: int = 0
    asked: int = 0

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            incarnation=secrets.token_hex(16),
            role=pb.ROLE_BOTH,
            model="demo",
            revision="fake",
            max_model_len=1 << 16,
            vocab_size=self.vocab_size,
            block_size=16,
            num_blocks=1 << 16,
            handoff_address="127.0.0.1:9",
            max_running=1 << 10,
            compatibility="fake",
            tokenizer=NO_TOKENIZER,
        )

    async def Connect(  # noqa: N802 (the name is the contract's)
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        hello = self.hello()
        async for answer in _greeted(aiter(request_iterator), hello.incarnation):
            yield answer
        frames = self.frames = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield pb.WorkerMessage(hello=hello)
            while True:
                yield await frames.get()
        finally:
            reader.cancel()
            self.frames = None
            self.seats = {name: seat for name, seat in self.seats.items() if seat.client is not None}

    async def SwitchRole(  # noqa: N802 (the name is the contract's)
        self,
        request: pb.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchRoleRequest, pb.SwitchRoleReply],
    ) -> pb.SwitchRoleReply:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the role of this worker stays")

    async def _read(self, messages: AsyncIterator[pb.RouterMessage]) -> None:
        joiner = Joiner(pb.RouterMessage, MAX_BYTES)
        async for each in messages:
            message = joiner.join(each)
            if message is None:
                continue
            if message.HasField("submit"):
                submit = message.submit
                self.taken += 1
                left = submit.params.max_tokens - len(submit.output_ids)
                seat = Seat(submit.request_id, left, submit.attempt, len(submit.output_ids))
                self.seats[seat.name] = seat
            elif message.HasField("cancel"):
                self.seats.pop(message.cancel.request_id, None)

    def step(self) -> None:
        """Give every request one more token."""
        now = time.monotonic_ns()
        frame = pb.Frame()
        for seat in list(self.seats.values()):
            self.record.write(f"{now} {seat.name} {seat.said}\n")
            seat.left -= 1
            if seat.left == 0:
                del self.seats[seat.name]
            if seat.client is not None:
                _write_event(seat)
            else:
                frame.deltas.append(self._delta(seat))
            seat.said += 1
        if self.frames is not None:
            load = pb.Load(running=len(self.seats), blocks_free=1 << 16, submits_taken=self.taken)
            frame.load.CopyFrom(load)
            self.frames.put_nowait(pb.WorkerMessage(frame=frame))

    def _delta(self, seat: Seat) -> pb.TokenDelta:
        return pb.TokenDelta(
            request_id=seat.name,
            attempt=seat.attempt,
            first_seq=seat.said,
            token_ids=[self.token_ids[seat.said % len(self.token_ids)]],
            finish_reason=(
                inference_pb2.FINISH_REASON_UNSPECIFIED if seat.left else inference_pb2.FINISH_REASON_LENGTH
            ),
        )


async def _greeted(
    messages: AsyncIterator[pb.RouterMessage], incarnation: str
) -> AsyncIterator[pb.WorkerMessage]:
    """Greet as a worker of the router's release does: releases from before greetings are measured as well."""
    first = await anext(messages)
    if not first.HasField("greeting"):
        return
    called = Called(ClusterKeys(os.environ[CLUSTER_KEY].encode()), "router", incarnation, first.greeting)
    yield pb.WorkerMessage(challenge=called.challenge)
    called.check((await anext(messages)).proof)
    await anext(messages)


def _write_event(seat: Seat) -> None:
    assert seat.client is not None
    event = b'data: {"id":"%s","choices":[{"index":0,"text":"word"}]}\n\n' % seat.name.encode()
    last = b"" if seat.left else b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    seat.client.write(b"%x\r\n%s\r\n%s" % (len(event), event, last))


@dataclass(eq=False)
class PlainApi(asyncio.Protocol):
    """One connection to a worker's plain API."""

    worker: Worker
    number: int
    transport: asyncio.Transport | None = None
    data: bytes = b""
    seat: Seat | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, whole, body = self.data.partition(b"\r\n\r\n")
        size = _BODY.search(head)
        length = _LENGTH.search(body)
        if not whole or size is None or len(body) < int(size[1]) or length is None or self.transport is None:
            return
        self.data = b""
        self.worker.asked += 1
        self.seat = Seat(f"p{self.number}-{self.worker.asked}", int(length[1]), client=self.transport)
        self.worker.seats[self.seat.name] = self.seat
        self.transport.write(HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        if self.seat is not None:
            self.worker.seats.pop(self.seat.name, None)


async def serve(workers: list[Worker], step_s: float) -> None:
    """Serve until the process is killed."""
    loop = asyncio.get_running_loop()
    servers = []
    for number, worker in enumerate(workers):
        server = grpc.aio.server(options=NO_PROBES)
        pb_grpc.add_WorkerServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        api = await loop.create_server(lambda w=worker, n=number: PlainApi(w, n), "127.0.0.1", 0)  # type: ignore[misc]
        plain = api.sockets[0].getsockname()[1]
        print(f"WORKER 127.0.0.1:{port} 127.0.0.1:{plain}", flush=True)
    print("READY", flush=True)
    began, turn = loop.time(), 0
    while True:
        at = began + turn * step_s / len(workers)
        await asyncio.sleep(max(0.0, at - loop.time()))
        workers[turn % len(workers)].step()
        workers[0].record.flush()
        turn += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--record", type=Path, required=True, help="when each token was there")
    chosen = parser.parse_args()
    tokenizer = Tokenizer.from_dir(hub.resolve_model("demo"))
    ids = tokenizer.encode(TEXT)
    with chosen.record.open("w", buffering=1 << 20) as record:
        workers = [Worker(ids, tokenizer.vocab_size, record) for _ in range(chosen.workers)]
        gc.disable()  # a collection over all seats would be in the router's times
        uvloop.run(serve(workers, chosen.step_ms / 1e3))


if __name__ == "__main__":
    main()
