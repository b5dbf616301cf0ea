"""A TCP proxy on loopback, which may be led elsewhere and records what its first caller sends."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loadtest.hostile.wire import loopback

LOOK_S = 0.1
PIECE = 1 << 16
MAX_RECORDED = 4 << 20


class Proxy:
    """Passes each connection on to the target at the moment it comes."""

    def __init__(self, to: str, record: Path | None = None) -> None:
        """``to``: the target. Raises ValueError unless it is on loopback."""
        self._to = loopback(to)
        self._record = record
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="proxy")
        self._thread.start()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def lead_to(self, to: str) -> None:
        """Change the target. Open connections stay where they are."""
        self._to = loopback(to)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        while not self._over.is_set():
            try:
                caller, _ = self._listener.accept()
            except TimeoutError:
                continue
            record = None if threads else self._record
            threads.append(threading.Thread(target=self._pass_on, args=(caller, record), name="proxied"))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _pass_on(self, caller: socket.socket, record: Path | None) -> None:
        """Copy both ways, until one side closes."""
        recorded = 0
        with (
            caller,
            suppress(OSError),
            socket.create_connection(self._to) as called,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(caller, selectors.EVENT_READ, called)
            selector.register(called, selectors.EVENT_READ, caller)
            while not self._over.is_set():
                for key, _ in selector.select(LOOK_S):
                    source = caller if key.fileobj is caller else called
                    data = source.recv(PIECE)
                    if not data:
                        return
                    if source is caller and record is not None and recorded < MAX_RECORDED:
                        recorded += len(data)
                        with record.open("ab") as out:
                            out.write(data)
                    key.data.sendall(data)


@contextmanager
def proxied(to: str, record: Path | None = None) -> Iterator[Proxy]:
    """A proxy that is closed at the end, and with it every connection through it."""
    proxy = Proxy(to, record)
    try:
        yield proxy
    finally:
        proxy.close()
