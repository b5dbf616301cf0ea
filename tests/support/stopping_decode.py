"""Decode's end of control streams in a process of its own, which stops itself (SIGSTOP) in the middle of its
first calls, when the caller is greeted and waits. Run as a module, with the number of such calls; it prints
the port on which it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Called
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc

KEYS = ClusterKeys(b"key")
ACCEPT = pb.LinkAccept(decode_incarnation="decode", epoch=1, connector="tcp", block_size=4)


class StoppingDecode(pb_grpc.HandoffServicer):
    def __init__(self, stops: int) -> None:
        self._stops = stops

    async def Link(  # noqa: N802 (the name is given by the proto)
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: object
    ) -> AsyncIterator[pb.DecodeMessage]:
        messages = aiter(request_iterator)
        greeting = (await anext(messages)).greeting
        yield pb.DecodeMessage(challenge=Called(KEYS, "prefill", "decode", greeting).challenge)
        await anext(messages)
        await anext(messages)
        if self._stops:
            self._stops -= 1
            os.kill(os.getpid(), signal.SIGSTOP)
        yield pb.DecodeMessage(accept=ACCEPT)
        async for _ in messages:
            pass


async def main() -> None:
    server = grpc.aio.server()
    pb_grpc.add_HandoffServicer_to_server(StoppingDecode(int(sys.argv[1])), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
