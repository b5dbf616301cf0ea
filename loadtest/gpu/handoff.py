"""KV blocks from a process's pool to another's, over each connector, on one device.

The receiver is this process, the sender its child. Every receive is posted before the sender hears that it
may start, as decode posts its own before it grants room.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.connector import choice
from baton.connector.memory import PoolMemory, pinned
from baton.connector.staging import Staging, heap
from baton.connector.transport import Connector, PageMemory
from loadtest.gpu.bench import Bench, Section
from loadtest.shapes import SHAPES

ROUNDS = 5
LOCALHOST = "127.0.0.1"
GO, DONE = b"g", b"d"


@dataclass(frozen=True)
class Transfer:
    """One round: messages of adjacent blocks, until ``round_bytes`` have been moved."""

    model: str
    dtype: torch.dtype
    block_size: int
    blocks: int
    round_bytes: int

    def pool(self, device: torch.device) -> torch.Tensor:
        """As many blocks as a round moves, up to 2 GiB."""
        number: dict[str, int] = {k: v for k, v in SHAPES[self.model].items() if isinstance(v, int)}
        heads, layers = number["num_key_value_heads"], number["num_hidden_layers"]
        dim = number["hidden_size"] // number["num_attention_heads"]
        block_bytes = heads * layers * 2 * self.block_size * dim * self.dtype.itemsize
        count = max(1, min(self.round_bytes, 2 << 30) // (block_bytes * self.blocks)) * self.blocks
        return torch.ones(count, heads, layers, 2, self.block_size, dim, dtype=self.dtype, device=device)

    def messages(self, pool: torch.Tensor) -> list[range]:
        """The blocks of each."""
        places = pool.shape[0] // self.blocks
        number = max(1, self.round_bytes // (pool[0].nbytes * self.blocks))
        return [range(i % places * self.blocks, (i % places + 1) * self.blocks) for i in range(number)]


def connector_of(kind: str, device: torch.device) -> Connector:
    """ConnectorMissingError if it cannot be had here."""
    on_cuda = device.type == "cuda"
    staging = Staging(allocate=pinned if on_cuda else heap)
    index = torch.cuda.current_device() if on_cuda else None
    found = choice.available(kind, device=index, host=LOCALHOST, on_crash=os.abort, staging=staging)
    return found[kind]


def memory_of(pool: torch.Tensor) -> PageMemory:
    return PoolMemory(pool).part(pool.shape[4])


async def send(kind: str, transfer: Transfer, device: torch.device, port: int, address: str) -> None:
    """The child: on each byte from the parent, one round; an empty read ends it."""
    sock = socket.create_connection((LOCALHOST, port))
    connector = connector_of(kind, device)
    pool = transfer.pool(device)
    messages = transfer.messages(pool)
    token = sock.recv(32, socket.MSG_WAITALL)
    link = await connector.connect(address, token, memory_of(pool), lambda: None)
    tag = 0
    while sock.recv(1):
        await asyncio.gather(*(link.send(tag + i, blocks) for i, blocks in enumerate(messages)))
        tag += len(messages)
        sock.sendall(DONE)
    await link.close()
    await connector.close()


async def receive(kind: str, transfer: Transfer, device: torch.device) -> float:
    """Bytes a second, the median of a few rounds behind a first one that is not counted."""
    connector = connector_of(kind, device)
    address = await connector.listen(LOCALHOST, 0)
    pool = transfer.pool(device)
    messages = transfer.messages(pool)
    with socket.create_server((LOCALHOST, 0)) as listener:
        port = listener.getsockname()[1]
        dtype = str(transfer.dtype).removeprefix("torch.")
        numbers = (transfer.block_size, transfer.blocks, transfer.round_bytes, port)
        argv = (sys.executable, "-m", __name__, kind, str(device), transfer.model, dtype, *map(str, numbers))
        own = {**os.environ, "NCCL_HOSTID": "sender"}  # or NCCL refuses two ranks on one device
        child = subprocess.Popen([*argv, address], env=own)  # noqa: ASYNC220 (nothing else waits here)
        listener.settimeout(120)
        sock, _ = await asyncio.to_thread(listener.accept)
    token = os.urandom(32)
    link = connector.expect(token, memory_of(pool), lambda: None)
    sock.sendall(token)
    rates = []
    for number in range(ROUNDS + 1):
        first = number * len(messages)
        receives = [link.post_receive(first + i, blocks) for i, blocks in enumerate(messages)]
        began = time.perf_counter()
        sock.sendall(GO)
        await asyncio.gather(*receives)
        rates.append(len(messages) * len(messages[0]) * pool[0].nbytes / (time.perf_counter() - began))
        await asyncio.to_thread(sock.recv, 1)
    sock.close()
    await link.close()
    await connector.close()
    await asyncio.to_thread(child.wait)
    return statistics.median(rates[1:])


def measure(bench: Bench) -> list[Section]:
    scale = bench.scale
    section = Section(
        "KV handoff between two processes on the device", ("connector", "blocks a message", "MB", "GB/s")
    )
    os.environ.setdefault("NCCL_HOSTID", "receiver")
    for kind in scale.connectors:
        for blocks in scale.message_blocks:
            transfer = Transfer(scale.model, scale.dtype, scale.block_size, blocks, scale.round_bytes)
            megabytes = transfer.blocks * transfer.pool(torch.device("meta"))[0].nbytes / 1e6
            try:
                rate = asyncio.run(receive(kind, transfer, bench.device))
            except choice.ConnectorMissingError as error:
                section.notes.append(f"{kind}: {error}")
                break
            section.rows.append((kind, str(blocks), f"{megabytes:.1f}", f"{rate / 1e9:.2f}"))
    return [section]


def main(arguments: Sequence[str]) -> None:
    kind, device, model, dtype, block_size, blocks, round_bytes, port, address = arguments
    transfer = Transfer(model, getattr(torch, dtype), int(block_size), int(blocks), int(round_bytes))
    asyncio.run(send(kind, transfer, torch.device(device), int(port), address))
    os._exit(0)  # as a worker does: threads of gloo and NCCL outlive what they served


if __name__ == "__main__":
    main(sys.argv[1:])
