"""Goodput of each connector, moving segments of KV blocks between two processes, against the same library's
plain point-to-point messages of the same size.

    python -m loadtest.connectors [--kinds tcp,ucx,ucx-tcp,gloo] [--rounds 7]

The receiver is this process, the sender its child. Rounds of the two alternate, and medians are compared: the
machine may be busy with something else for part of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from baton.connector.door import keep_alive
from baton.connector.group import GroupConnector
from baton.connector.tcp import TcpConnector
from baton.connector.transport import Connector

BLOCK_BYTES = 16 * 16 * 2 * 4 * 64 * 2
"""Of a model of 125 M parameters: 16 tokens, 16 layers, K and V, 4 heads of 64, two bytes each."""
SEGMENT_BLOCKS = 16
SEGMENTS = 32
SEGMENT_BYTES = SEGMENT_BLOCKS * BLOCK_BYTES
ROUND_BYTES = SEGMENTS * SEGMENT_BYTES
UCX: dict[str, Mapping[str, str]] = {"ucx": {}, "ucx-shm": {"TLS": "posix,self"}, "ucx-tcp": {"TLS": "tcp"}}
KINDS = ("tcp", *UCX, "gloo")


class Pool:
    """Blocks in plain memory, every page of it touched."""

    def __init__(self) -> None:
        self.bytes = bytearray(os.urandom(SEGMENT_BYTES) * SEGMENTS)

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def source(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.bytes)[pages[0] * BLOCK_BYTES : (pages[-1] + 1) * BLOCK_BYTES]]

    def target(self, pages: Sequence[int]) -> list[memoryview]:
        return self.source(pages)

    def landed(self, pages: Sequence[int], views: list[memoryview]) -> None:
        pass

    def segment(self, index: int) -> memoryview:
        return self.source(blocks(index))[0]


def blocks(segment: int) -> range:
    return range(segment * SEGMENT_BLOCKS, (segment + 1) * SEGMENT_BLOCKS)


def make(kind: str) -> Connector:
    if kind == "tcp":
        return TcpConnector()
    if kind == "gloo":
        return GroupConnector("gloo")
    from baton.connector.ucx import UcxConnector

    return UcxConnector(UCX[kind])


@dataclass
class Plain:
    """The library alone: ``move(0)`` is one round of this process's part."""

    move: Callable[[], None]


def plain_tcp(pool: Pool, sock: socket.socket, sending: bool) -> Plain:
    views = [pool.segment(i) for i in range(SEGMENTS)]

    def move() -> None:
        for view in views:
            if sending:
                sock.sendall(view)
            rest = view[:0] if sending else view
            while rest.nbytes:
                rest = rest[sock.recv_into(rest) :]

    return Plain(move)


def plain_gloo(pool: Pool, sock: socket.socket, sending: bool) -> Plain:
    import torch
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    if sending:
        port = int.from_bytes(sock.recv(2))
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
    else:
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        sock.sendall(store.port.to_bytes(2))
    group = ProcessGroupGloo(store, int(sending), 2, timedelta(seconds=60))
    tensors = [torch.frombuffer(pool.segment(i), dtype=torch.uint8) for i in range(SEGMENTS)]
    transfer = group.send if sending else group.recv  # type: ignore[attr-defined]

    def move() -> None:
        for tensor in tensors:
            transfer([tensor], int(not sending), 0).wait()

    return Plain(move)


def plain_ucx(pool: Pool, sock: socket.socket, sending: bool, extra: Mapping[str, str]) -> Plain:
    """Posted receives and sends, all at once, progressed by the thread that waits. Options as Baton's."""
    from baton.connector import ucx

    ucp = ucx.load()
    array = importlib.import_module("ucxx._lib.arr").Array
    scheme = "am" if "TLS" in extra else "get_zcopy"
    options = {**ucx.OPTIONS, "RNDV_THRESH": "0", "RNDV_SCHEME": scheme, **extra}
    worker = ucp.UCXWorker(ucp.UCXContext(options, (ucp.Feature.TAG, ucp.Feature.WAKEUP)))
    worker.init_blocking_progress_mode()
    own = bytes(memoryview(worker.address))
    sock.sendall(len(own).to_bytes(2) + own)
    peer = sock.recv(int.from_bytes(sock.recv(2)), socket.MSG_WAITALL)
    endpoint = ucp.UCXEndpoint.create_from_worker_address(
        worker, ucp.UCXAddress.create_from_buffer(peer), True
    )
    transfer = endpoint.tag_send if sending else worker.tag_recv

    def move() -> None:
        waiting = [transfer(array(pool.segment(i)), ucp.UCXXTag(i + 1)) for i in range(SEGMENTS)]
        while waiting:
            worker.progress_worker_event(20)
            waiting = [request for request in waiting if not request.completed]

    return Plain(move)


def plain(kind: str, pool: Pool, sock: socket.socket, sending: bool) -> Plain:
    if kind == "tcp":
        return plain_tcp(pool, sock, sending)
    if kind == "gloo":
        return plain_gloo(pool, sock, sending)
    return plain_ucx(pool, sock, sending, UCX[kind])


async def send(kind: str, rounds: int, port: int, address: str, token: str) -> None:
    """The child: on each byte from the parent, one round."""
    pool = Pool()
    sock = socket.create_connection(("127.0.0.1", port))
    keep_alive(sock)
    alone = plain(kind, pool, sock, sending=True)
    connector = make(kind)
    link = await connector.connect(address, bytes.fromhex(token), pool, lambda: None)
    for number in range(rounds):
        await asyncio.to_thread(sock.recv, 1)
        sends = [link.send(number * SEGMENTS + i, blocks(i)) for i in range(SEGMENTS)]
        await asyncio.gather(*sends)
        await asyncio.to_thread(sock.recv, 1)
        alone.move()
    await asyncio.to_thread(sock.recv, 1)
    await link.close()
    await connector.close()


async def receive(kind: str, rounds: int) -> tuple[list[float], list[float]]:
    """GB/s of each round: through the connector, and of the library alone."""
    pool, token = Pool(), os.urandom(32)
    connector = make(kind)
    address = await connector.listen("127.0.0.1", 0)
    link = connector.expect(token, pool, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        argv = (sys.executable, "-m", __spec__.name, "--child", kind, str(rounds), str(port), address)
        child = subprocess.Popen([*argv, token.hex()])  # noqa: ASYNC220 (nothing else waits here)
        sock, _ = await asyncio.to_thread(listener.accept)
    keep_alive(sock)
    alone = await asyncio.to_thread(plain, kind, pool, sock, False)
    through, by_itself = [], []
    for number in range(rounds):
        receives = [link.post_receive(number * SEGMENTS + i, blocks(i)) for i in range(SEGMENTS)]
        started = time.perf_counter()
        sock.sendall(b"c")
        await asyncio.gather(*receives)
        through.append(ROUND_BYTES / (time.perf_counter() - started) / 1e9)
        started = time.perf_counter()
        sock.sendall(b"p")
        await asyncio.to_thread(alone.move)
        by_itself.append(ROUND_BYTES / (time.perf_counter() - started) / 1e9)
    sock.sendall(b"e")
    await link.close()
    await connector.close()
    await asyncio.to_thread(child.wait)
    return through, by_itself


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, rounds, port, address, token = sys.argv[2:]
        asyncio.run(send(kind, int(rounds), int(port), address, token))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{SEGMENTS} segments of {SEGMENT_BYTES >> 10} KiB a round, median of {options.rounds}")
    print(f"{'connector':<10} {'GB/s':>7} {'library':>8} {'ratio':>6}   rounds")
    for kind in options.kinds.split(","):
        # One more than asked for: in the first, either side meets its memory for the first time.
        through, alone = (rates[1:] for rates in asyncio.run(receive(kind, options.rounds + 1)))
        goodput, library = statistics.median(through), statistics.median(alone)
        each = " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(through, alone, strict=True))
        print(f"{kind:<10} {goodput:7.2f} {library:8.2f} {goodput / library:6.2f}   {each}", flush=True)


if __name__ == "__main__":
    main()
