"""A worker to which data connections bring something else than was sent: one bit of every third message is
turned (BATON_CARELESS_EVERY sets another number). Run as a module, with the arguments of ``baton``."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable

from baton.cli.main import app
from baton.transport import stream

EVERY = int(os.environ.get("BATON_CARELESS_EVERY", "3"))
HEADER_BYTES = 16

Receive = Callable[[socket.socket, list[memoryview]], None]


def careless(receive: Receive) -> Receive:
    """``receive``, with a fault in every so many messages; their headers come as they were sent."""
    count = itertools.count(1)

    def receive_carelessly(sock: socket.socket, views: list[memoryview]) -> None:
        first = views[0]
        receive(sock, views)
        if first.nbytes > HEADER_BYTES and next(count) % EVERY == 0:
            first[3] ^= 0x40  # the exponent of the first number

    return receive_carelessly


if __name__ == "__main__":
    stream.read_into = careless(stream.read_into)  # type: ignore[assignment]
    app()
