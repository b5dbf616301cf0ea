"""KV blocks from one engine's pool to another's, over one connector, on one device: while both are idle,
while the receiver decodes, and while both do.

The receiver is this process, the sender its child. Each has an engine of its own, loaded before the connector
is made, so that the device's context is there when a library looks for it. Every receive is posted before the
sender hears that it may start, as decode posts its own before it grants room. The bytes are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.transport import registry
from baton.transport.base import Connector, ConnectorMissingError, Link, PageMemory
from baton.transport.pool_memory import PoolMemory
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import one_step, params, sequences
from loadtest.gpu.model import engine_config
from loadtest.gpu.results import Results, SkipPartError
from loadtest.gpu.scale import FULL, TINY, Scale

LOCALHOST = "127.0.0.1"
ROUND, DECODE, REST, DONE = b"r", b"d", b"s", b"k"
PATTERN = 97
"""The number of values that blocks are filled with, one after the other."""
IDLE, RECEIVER, BOTH = "Both engines idle", "The receiver decodes", "Both engines busy"
START_S = 50.0
STACKS_S = 3.0
"""The seconds before the part's limit at which the sender shows its threads' stacks."""
SOCKET_BYTES = 1 << 28
TOLD_BYTES = 512
"""The size of what the sender is told first, in bytes: address and token as JSON, and spaces."""
PIECE = 2 << 20


class Decoding:
    """An engine that decodes on a thread of its own, again and again."""

    def __init__(self, engine: Engine, rows: int, context: int, new_tokens: int) -> None:
        self._engine = engine
        self._rows = rows
        self._context = context
        self._new_tokens = new_tokens
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self.steps: list[tuple[float, float]] = []
        """The moment and the seconds of each step in which all rows decoded."""

    def start(self) -> None:
        self._stop.clear()
        self.steps = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait(self, since: float = 0.0, steps: int = 5) -> None:
        """Wait until so many steps have begun since a moment. Raises what ended the thread."""
        while sum(at >= since for at, _ in list(self.steps)) < steps:
            if self._failed is not None:
                raise self._failed
            time.sleep(0.002)

    def stop(self) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        self._engine.cancel_all_of("")
        while self._engine.has_work:
            self._engine.step()

    def median(self, began: float = 0.0) -> float:
        """Return the median of the steps since a moment, in seconds."""
        return statistics.median(seconds for at, seconds in self.steps if at >= began)

    def _run(self) -> None:
        try:
            self._decode()
        except Exception as error:
            self._failed = error
            raise

    def _decode(self) -> None:
        number = 0
        while not self._stop.is_set():
            if not self._engine.has_work:
                number += 1
                for one in sequences(
                    self._engine, self._rows, self._context, params(self._new_tokens), seed=number
                ):
                    self._engine.add(one)
            at = time.perf_counter()
            step = one_step(self._engine)
            if step.rows == self._rows and not step.prompt_tokens:
                self.steps.append((at, step.seconds))


@dataclass(frozen=True)
class Side:
    """One process: its engine, and the blocks of its pool that messages go to or come from."""

    bench: Bench
    pool: Tensor
    pool_memory: PoolMemory
    blocks: list[int]
    decoding: Decoding

    @classmethod
    def load(cls, bench: Bench, round_bytes: int) -> Side:
        scale = bench.scale
        longest = scale.contexts[0] + 8 * scale.output_len
        config = engine_config(bench, longest, scale.handoff_rows, kv_cache_bytes=scale.handoff_kv_bytes)
        engine = Engine.from_config(config)
        assert isinstance(engine.runner, ModelRunner)
        pool = engine.runner.pool
        with engine.lock:
            blocks = engine.pool.allocate(blocks_of(scale, pool, round_bytes))
        assert blocks is not None, "the pool is too small for a round"
        context = scale.contexts[0]
        decoding = Decoding(engine, scale.handoff_rows, context, longest - context - scale.block_size)
        return cls(bench, pool, PoolMemory(pool), blocks, decoding)

    @property
    def memory(self) -> PageMemory:
        return self.pool_memory.part(self.pool.shape[4])

    @property
    def nbytes(self) -> int:
        """Return the bytes of a round."""
        return len(self.blocks) * self.pool[0].nbytes

    def messages(self, size: int) -> list[list[int]]:
        """Return the blocks of each message of ``size`` blocks."""
        return [self.blocks[at : at + size] for at in range(0, len(self.blocks), size)]

    def fill(self) -> None:
        """Give each block a content of its own."""
        for at, block in enumerate(self.blocks):
            self.pool[block].fill_(at % PATTERN)
        self.bench.synchronize()

    def right(self) -> bool:
        """Whether each block has the content that ``fill`` gives it."""
        expected = torch.arange(len(self.blocks), device=self.pool.device) % PATTERN
        found = self.pool[self.blocks].flatten(1)
        return bool((found == expected[:, None].to(found.dtype)).all())

    def connector(self, kind: str) -> Connector:
        """Make the connector. Raises ConnectorMissingError if it is not available here."""
        settings = self.pool_memory.connector_settings(os.abort, LOCALHOST)
        return next(iter(registry.available(kind, settings).values()))


def blocks_of(scale: Scale, pool: Tensor, round_bytes: int) -> int:
    """Return the blocks of a round: so many that the largest messages come out even."""
    largest = max(scale.message_blocks)
    return largest * max(1, round_bytes // (pool[0].nbytes * largest))


# --- the sender


async def send(kind: str, side: Side, sock: socket.socket) -> None:
    """Run what the parent says; an empty read ends it."""
    side.fill()
    connector = side.connector(kind)
    told = json.loads(await asyncio.to_thread(sock.recv, TOLD_BYTES, socket.MSG_WAITALL))
    link = await connector.connect(told["address"], bytes.fromhex(told["token"]), side.memory, lambda: None)
    tag = 0
    while order := await asyncio.to_thread(sock.recv, 1):
        if order == ROUND:
            size = sock.recv(1, socket.MSG_WAITALL)[0]
            messages = side.messages(size)
            await asyncio.gather(*(link.send(tag + i, blocks) for i, blocks in enumerate(messages)))
            tag += len(messages)
        elif order == DECODE:
            side.decoding.start()
            await asyncio.to_thread(side.decoding.wait)
        else:
            side.decoding.stop()
        sock.sendall(DONE)
    await link.close()
    await connector.close()


# --- the receiver


@dataclass
class Receiver:
    """The link, and the child at its other end."""

    side: Side
    link: Link
    sock: socket.socket
    tag: int = 0

    async def tell(self, order: bytes) -> None:
        self.sock.sendall(order)
        await asyncio.to_thread(self.sock.recv, 1)

    async def round(self, size: int) -> float:
        """Return the bytes/s of one round of messages of ``size`` blocks."""
        messages = self.side.messages(size)
        receives = [self.link.post_receive(self.tag + i, blocks) for i, blocks in enumerate(messages)]
        self.tag += len(messages)
        began = time.perf_counter()
        self.sock.sendall(ROUND + bytes([size]))
        await asyncio.gather(*receives)
        seconds = time.perf_counter() - began
        await asyncio.to_thread(self.sock.recv, 1)
        return self.side.nbytes / seconds

    async def rounds(self, size: int) -> list[float]:
        """Return the rates of as many rounds as the time for a condition allows, one at least."""
        until = time.monotonic() + self.side.bench.scale.condition_seconds
        rates = [await self.round(size)]
        while time.monotonic() < until:
            rates.append(await self.round(size))
        return rates


async def receive(bench: Bench, kind: str, round_bytes: int) -> None:
    with socket.create_server((LOCALHOST, 0)) as listener:
        child = start_sender(bench, kind, round_bytes, listener.getsockname()[1])
        try:
            side = Side.load(bench, round_bytes)
            connector = side.connector(kind)
            address = await connector.listen(LOCALHOST, 0)
            sock = await asyncio.to_thread(accept, listener, child)
            token = os.urandom(32)
            link = connector.expect(token, side.memory, lambda: None)
            told = {"address": address, "token": token.hex()}
            sock.sendall(json.dumps(told).ljust(TOLD_BYTES).encode())
            await conditions(bench, kind, Receiver(side, link, sock))
            sock.close()
            await link.close()
            await connector.close()
            await asyncio.to_thread(child.wait, 10)
        finally:
            child.kill()


def start_sender(bench: Bench, kind: str, round_bytes: int, port: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", __name__, kind, str(round_bytes), str(port), str(bench.tmp / "sender")]
    argv.append(f"{bench.left:.1f}")
    own = {**os.environ, "NCCL_HOSTID": "sender"}  # NCCL refuses two ranks on one device otherwise
    return subprocess.Popen([*argv, *(["--dry-run"] if bench.dry else [])], env=own)


def accept(listener: socket.socket, child: subprocess.Popen[bytes]) -> socket.socket:
    """Return the sender's connection. Raises RuntimeError if it ends before it connects."""
    listener.settimeout(0.5)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if child.poll() is not None:
                raise RuntimeError(f"the sender ended with {child.returncode}") from None
    raise RuntimeError(f"the sender did not connect within {START_S:.0f} s")


async def conditions(bench: Bench, kind: str, receiver: Receiver) -> None:
    """Measure all conditions, one after the other."""
    side, largest = receiver.side, max(bench.scale.message_blocks)
    side.pool[side.blocks] = 0
    bench.synchronize()
    link = link_rate(bench, kind)
    await receiver.round(largest)  # connects, registers memory and touches it
    block = side.pool[0].nbytes
    for size in bench.scale.message_blocks:
        rates = await receiver.rounds(size)
        row(bench, IDLE, size * block, rates, link)
    bench.results.row("Bytes", blocks=len(side.blocks), right=side.right())
    for condition in (RECEIVER, BOTH):
        if condition == BOTH:
            await receiver.tell(DECODE)
        side.decoding.start()
        await asyncio.to_thread(side.decoding.wait)
        await asyncio.sleep(bench.scale.condition_seconds)
        alone = side.decoding.median()
        began = time.perf_counter()
        rates = await receiver.rounds(largest)
        await asyncio.to_thread(side.decoding.wait, began, 1)
        beside = side.decoding.median(began)
        side.decoding.stop()
        if condition == BOTH:
            await receiver.tell(REST)
        steps = {"step alone, ms": alone * 1e3, "step beside, ms": beside * 1e3}
        row(
            bench, condition, largest * block, rates, link, **steps, **{"steps longer by": beside / alone - 1}
        )
    if not side.right():
        raise RuntimeError("the blocks that arrived are not those that were sent")
    bench.results.note(
        BOTH,
        "Two processes share the device by turns, so that the sender's steps make the receiver's longer: its "
        "steps alone are those beside the sender's, without transfers.",
    )


def row(bench: Bench, table: str, message: int, rates: Items[float], link: float, **more: float) -> None:
    rate = statistics.median(rates)
    figures = {"GB/s": rate / 1e9, "link, GB/s": link / 1e9, "of the link": rate / link}
    bench.results.row(table, **{"message, MB": message / 1e6, "rounds": len(rates)}, **figures, **more)


def link_rate(bench: Bench, kind: str) -> float:
    """Return the bytes/s of what the connector moves blocks through: over TCP a plain socket between two
    threads, elsewhere a copy within the device's memory, of which half is read and half written."""
    return over_socket() if kind == "tcp" else bench.roof().bytes_per_s / 2


def over_socket() -> float:
    """Return the bytes/s of a plain socket on this host."""
    argv = [sys.executable, "-c", SENDER, str(SOCKET_BYTES)]
    with socket.create_server((LOCALHOST, 0)) as listener:
        child = subprocess.Popen([*argv, str(listener.getsockname()[1])])
        listener.settimeout(20)
        sock, _ = listener.accept()
    piece, left = bytearray(PIECE), SOCKET_BYTES
    began = time.perf_counter()
    while left:
        left -= sock.recv_into(piece, min(left, PIECE))
    taken = time.perf_counter() - began
    sock.close()
    child.wait(10)
    return SOCKET_BYTES / taken


SENDER = f"""
import socket, sys
piece = bytes({PIECE})
with socket.create_connection(("{LOCALHOST}", int(sys.argv[2]))) as sock:
    for _ in range(int(sys.argv[1]) // len(piece)):
        sock.sendall(piece)
"""


def measure(bench: Bench, kind: str) -> None:
    """Measure one connector."""
    if kind not in registry.TRANSPORTS:
        raise SkipPartError(f"there is no connector {kind}")
    os.environ["NCCL_HOSTID"] = "receiver"
    scale = bench.scale
    try:
        asyncio.run(receive(bench, kind, scale.nccl_round_bytes if kind == "nccl" else scale.round_bytes))
    except ConnectorMissingError as error:
        raise SkipPartError(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind")
    parser.add_argument("round_bytes", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("tmp", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, args.seconds - STACKS_S))
    nowhere = Results(Path(os.devnull), "sender")
    bench = Bench.start(nowhere, TINY if args.dry_run else FULL, args.tmp, args.seconds, dry=args.dry_run)
    side = Side.load(bench, args.round_bytes)
    with socket.create_connection((LOCALHOST, args.port)) as sock:
        asyncio.run(send(args.kind, side, sock))
    os._exit(0)  # as a worker does: threads of gloo and NCCL outlive their connector


if __name__ == "__main__":
    main()
