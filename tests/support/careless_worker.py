"""A worker to which data connections bring something else than was sent: one bit of every third message is
turned (BATON_CARELESS_EVERY sets another number). Run as a module, with the arguments of ``baton``."""

from __future__ import annotations

import itertools
import os
import socket

from baton.cli.main import app
from baton.connector import tcp

EVERY = int(os.environ.get("BATON_CARELESS_EVERY", "3"))


class CarelessLink(tcp.ReceivingLink):
    """Decode's end of ``tcp``."""

    _count = itertools.count(1)

    def _fill(self, sock: socket.socket, views: list[memoryview]) -> None:
        super()._fill(sock, views)
        if next(self._count) % EVERY == 0:
            views[0][3] ^= 0x40  # the exponent of the first number


if __name__ == "__main__":
    tcp.ReceivingLink = CarelessLink  # type: ignore[misc]
    app()
