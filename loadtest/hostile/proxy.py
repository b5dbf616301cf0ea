"""A TCP proxy on loopback that writes down what the first caller says."""

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
MOST_RECORDED = 4 << 20


@contextmanager
def recording(address: str, file: Path) -> Iterator[str]:
    """Pass connections on to ``address``, from the address that is yielded."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LOOK_S)
    thread = threading.Thread(target=_accept, args=(listener, loopback(address), file, over), name="proxy")
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join()
        listener.close()


def _accept(listener: socket.socket, to: tuple[str, int], file: Path, over: threading.Event) -> None:
    threads: list[threading.Thread] = []
    while not over.is_set():
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        record = None if threads else file
        threads.append(threading.Thread(target=_pass_on, args=(caller, to, record, over), name="proxied"))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _pass_on(caller: socket.socket, to: tuple[str, int], record: Path | None, over: threading.Event) -> None:
    """Both ways, until one side closes."""
    recorded = 0
    with (
        caller,
        suppress(OSError),
        socket.create_connection(to) as called,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(caller, selectors.EVENT_READ, called)
        selector.register(called, selectors.EVENT_READ, caller)
        while not over.is_set():
            for key, _ in selector.select(LOOK_S):
                source = caller if key.fileobj is caller else called
                data = source.recv(PIECE)
                if not data:
                    return
                if source is caller and record is not None and recorded < MOST_RECORDED:
                    recorded += len(data)
                    with record.open("ab") as out:
                        out.write(data)
                key.data.sendall(data)
