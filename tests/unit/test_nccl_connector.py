"""``nccl`` on fake devices: its transfers and the stream that computes have nothing to do with each other.

NCCL itself is played by ``Group``: as NCCL's, its transfers are put behind the stream that is current when
they are started, run once both ends have come to them, and ``wait`` puts the then current stream behind
them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed
from torch import Tensor

from baton.transport import torch_group
from baton.transport.base import Connector, Link, TransferError
from baton.transport.pool_memory import PoolMemory
from baton.transport.torch_group import nccl
from baton.transport.torch_store import LinkStore
from tests.support.fake_cuda.device import FakeCuda
from tests.support.links import WAIT_S, within


@dataclass
class Work:
    """One end's half of a transfer."""

    data: Tensor
    gate: torch.cuda.Event
    """What was on the stream that was current at the start."""
    started: threading.Event = field(default_factory=threading.Event)
    over: torch.cuda.Event | None = None
    waits: list[timedelta | None] = field(default_factory=list)

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits.append(timeout)
        assert self.started.wait(WAIT_S), "the other end never came"
        assert self.over is not None
        self.over.wait()


class Channel:
    """What the two groups of a link have between them."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.waiting: dict[str, list[Work]] = {"send": [], "receive": []}
        self.lock = threading.Lock()

    def add(self, kind: str, data: Tensor) -> Work:
        gate = torch.cuda.Event()  # type: ignore[no-untyped-call]
        gate.record()
        work = Work(data, gate)
        with self.lock:
            self.waiting[kind].append(work)
            if all(self.waiting.values()):
                self._move(*(works.pop(0) for works in self.waiting.values()))
        return work

    def _move(self, sent: Work, received: Work) -> None:
        assert sent.data.nbytes == received.data.nbytes
        with torch.cuda.stream(self.stream):
            for work in (sent, received):
                self.stream.wait_event(work.gate)
            received.data.copy_(sent.data)
            for work in (sent, received):
                work.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
                work.over.record()
                work.started.set()


class Group:
    """``torch.distributed.ProcessGroupNCCL``."""

    class Options:
        _timeout = timedelta(minutes=10)

    channels: ClassVar[dict[bytes, Channel]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()
    made: ClassVar[list[Group]] = []

    def __init__(self, store: LinkStore, rank: int, size: int, options: Options) -> None:
        self.error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        if rank == 0:
            store.set("id", b"%d" % next(self.numbers))
            self.channels[store.get("id")] = Channel()
            store.set("there", b"1")
        store.get("there")
        self.channel = self.channels[store.get("id")]
        self.aborted = threading.Event()
        self.works: list[Work] = []
        self.made.append(self)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return self._add("send", tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return self._add("receive", tensors)

    def _add(self, kind: str, tensors: list[Tensor]) -> Work:
        assert tensors[0].device.type == "cuda", "NCCL takes device memory only"
        assert torch.cuda.current_stream() != torch.cuda.default_stream(), "the stream that computes"
        self.works.append(self.channel.add(kind, tensors[0]))
        return self.works[-1]

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(Group, "channels", {})
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with FakeCuda() as fake:
        yield fake
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)


@dataclass
class Worker:
    """A worker that prefills and decodes."""

    memory: PoolMemory
    pool: Tensor
    connector: Connector
    address: str


async def worker(seed: int | None) -> Worker:
    shape = (32, 2, 3, 2, 16, 8)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    pool = (torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)).cuda()
    torch.cuda.synchronize()
    memory = PoolMemory(pool)
    connector = nccl(memory.connector_settings(lambda: None, "127.0.0.1"))
    return Worker(memory, pool, connector, await connector.listen("127.0.0.1", 0))


async def linked(prefill: Worker, decode: Worker, block_size: int = 16) -> tuple[Link, Link]:
    token = os.urandom(32)
    receiver = decode.connector.expect(token, decode.memory.part(block_size), lambda: None)
    source = prefill.memory.part(block_size)
    return await prefill.connector.connect(decode.address, token, source, lambda: None), receiver


async def closed(*ends: Link | Connector) -> None:
    await asyncio.gather(*(end.close() for end in ends))


async def test_blocks_arrive_while_a_step_is_under_way(cuda: FakeCuda) -> None:
    """Adjacent blocks go from pool to pool, the others through memory of the device: no byte of KV sees the
    host. Neither way waits for the step, which waits for neither."""
    prefill, decode = await worker(1), await worker(None)
    sender, receiver = await linked(prefill, decode)
    number = torch.zeros(1).cuda()
    torch.cuda.synchronize()
    number.add_(1)
    moved = [([3, 4, 5], [6, 7, 8]), ([9, 1, 20], [0, 30, 12]), ([11], [2])]
    received = [receiver.post_receive(tag, to) for tag, (_, to) in enumerate(moved)]
    sent = [sender.send(tag, origin) for tag, (origin, _) in enumerate(moved)]
    await within(asyncio.gather(*sent, *received))  # type: ignore[arg-type]
    for origin, to in moved:
        assert torch.equal(cuda.peek(decode.pool)[to], cuda.peek(prefill.pool)[origin])
    assert cuda.peek(number).item() == 0, "the step has not run"
    queue = torch.cuda.default_stream().queue  # type: ignore[attr-defined]
    assert len(queue.work) == 1, "and nothing was put behind it"
    assert all(work.waits == [None] for group in Group.made for work in group.works), "no wait that polls"
    await closed(sender, receiver, prefill.connector, decode.connector)


async def test_two_workers_that_send_to_each_other(cuda: FakeCuda) -> None:
    one, other = await worker(1), await worker(2)
    before = cuda.peek(one.pool), cuda.peek(other.pool)
    there, back = await linked(one, other), await linked(other, one)
    moving = []
    for tag, block in enumerate(range(0, 16, 2)):
        for sender, receiver in (there, back):
            moving += [receiver.post_receive(tag, [16 + block]), sender.send(tag, [block])]
    await within(asyncio.gather(*moving))  # type: ignore[arg-type]
    assert torch.equal(cuda.peek(other.pool)[16::2], before[0][:16:2])
    assert torch.equal(cuda.peek(one.pool)[16::2], before[1][:16:2])
    await closed(*there, *back, one.connector, other.connector)


async def test_parts_of_pages_go_through_the_devices_memory(cuda: FakeCuda) -> None:
    prefill, decode = await worker(1), await worker(None)
    sender, receiver = await linked(prefill, decode, 8)
    received = receiver.post_receive(1, [5, 4, 9])
    await within(asyncio.gather(sender.send(1, [5, 4, 9]), received))  # type: ignore[arg-type]
    here, there = (cuda.peek(each.pool) for each in (prefill, decode))
    assert torch.equal(here[2], there[2])
    assert torch.equal(here[4, :, :, :, 8:], there[4, :, :, :, 8:])
    assert not there[4, :, :, :, :8].any()
    await closed(sender, receiver, prefill.connector, decode.connector)


async def test_torch_may_not_end_the_process(cuda: FakeCuda) -> None:
    prefill, decode = await worker(1), await worker(None)
    sender, receiver = await linked(prefill, decode)
    await within(asyncio.gather(receiver.post_receive(1, [1]), sender.send(1, [1])))  # type: ignore[arg-type]
    assert [group.error_handling for group in Group.made] == ["0", "0"]
    await closed(sender, receiver, prefill.connector, decode.connector)


async def test_a_transfer_that_takes_too_long_ends_its_link(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would wait for ever, and the thread that waits for NCCL sleeps until it is broken off."""
    monkeypatch.setattr(torch_group, "_LONGEST", timedelta(seconds=0.4))
    prefill, decode = await worker(1), await worker(None)
    sender, receiver = await linked(prefill, decode)
    await within(asyncio.gather(receiver.post_receive(1, [1]), sender.send(1, [1])))  # type: ignore[arg-type]
    plain = cuda.Event.synchronize

    def synchronize(event: torch.cuda.Event) -> None:
        if threading.current_thread().name == "library-wait":
            assert all(group.aborted.wait(WAIT_S) for group in Group.made)
        plain(event)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda.Event, "synchronize", synchronize)
    received = asyncio.ensure_future(receiver.post_receive(2, [1]))
    sent = asyncio.ensure_future(sender.send(2, [1]))
    await asyncio.wait([received, sent], timeout=WAIT_S)
    assert all(isinstance(end.exception(), TransferError) for end in (received, sent))
    await closed(sender, receiver, prefill.connector, decode.connector)
