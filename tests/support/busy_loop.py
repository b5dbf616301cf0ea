"""A gRPC server and its client on one event loop whose turns are long.

    python -m tests.support.busy_loop [take_all]

Prints how many turns it took until the client had heard of everybody.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import grpc

from baton.net import grpc_wakeups

STREAMS = 64
MESSAGES = 40
TURN_S = 0.002


async def talk(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
    for _ in range(MESSAGES):
        yield b"token"


async def main() -> None:
    if sys.argv[1:] == ["take_all"]:
        grpc_wakeups.take_all()
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(talk)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def hear() -> int:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/s/m", None, None)
            return len([message async for message in call(b"")])

    everybody = asyncio.gather(*(hear() for _ in range(STREAMS)))
    turns = 0
    while not everybody.done():
        time.sleep(TURN_S)  # noqa: ASYNC251 - a loop that is busy
        await asyncio.sleep(0)
        turns += 1
    assert await everybody == [MESSAGES] * STREAMS
    print(turns)


if __name__ == "__main__":
    asyncio.run(main())
