"""Every connector does the same: bytes in the right pages, and a close that is a fence.

Both ends are in this process here; tests with a peer that dies or stops run it in one of its own. What only
concerns the wire format of ``tcp`` is in ``test_tcp_connector``.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import random
import signal
import socket
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor

from baton.process.options import join_address, parse_address
from baton.transport import registry, torch_group
from baton.transport.base import (
    Connector,
    ConnectorMissingError,
    ConnectorSettings,
    DeviceView,
    GroupPart,
    Link,
    PageMemory,
    TransferError,
)
from baton.transport.data_listener import HANDSHAKE_S, dial
from baton.transport.pool_memory import PoolMemory
from baton.transport.staging import PIECE_BYTES, Staging
from baton.transport.torch_group import MAGIC as GROUP_MAGIC
from baton.transport.torch_group import MEET_S
from baton.transport.torch_store import LinkStore
from baton.worker.config import CONNECTORS
from baton_kernels.kv_fp8 import FP8
from tests.support import sender
from tests.support.certificates import Authority
from tests.support.deep import all_deep_but
from tests.support.ipv6 import needs_ipv6
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory, kv_threads, until, within
from tests.support.nixl import loads_nixl
from tests.support.sender import LARGE, UCX, make
from tests.support.warm import ADDRESS, WarmProcess, warm_processes

FILES = Path("/proc/self/fd")
THREADS = Path("/proc/self/task")


def num_threads() -> int:
    """Without those of the event loop's own pool, which is bounded and grows whenever it has none idle."""
    pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return len(list(THREADS.iterdir())) - pool


KINDS = ("tcp", "tcp-tls", *UCX, pytest.param("nixl", marks=loads_nixl), "gloo")


@pytest.fixture(scope="session")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("certificates")
    Authority.new(folder).sign("kv")
    return sender.encrypted(folder)


@pytest.fixture(params=all_deep_but(3, KINDS))
def kind(request: pytest.FixtureRequest, encrypted: str) -> str:
    name: str = request.param
    if name == "tcp-tls":
        return encrypted
    if name in UCX and importlib.util.find_spec("ucxx") is None:
        pytest.skip("NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')")
    return name


class DeviceMemory(HostMemory):
    """Bytes that only a library that takes device memory finds by itself; host memory stands in for it."""

    copied = 0
    """Pieces that went by way of staging memory."""

    def in_place(self, pages: Sequence[int]) -> list[memoryview]:
        return []

    def on_device(self, pages: Sequence[int]) -> list[DeviceView]:
        return super().in_place(pages)  # type: ignore[return-value]

    def gather(self, pages: Sequence[int], into: memoryview | DeviceView) -> None:
        self.copied += 1
        assert isinstance(into, memoryview)
        into[:] = b"".join(super().in_place(pages))

    def scatter(self, pages: Sequence[int], piece: memoryview | DeviceView) -> None:
        self.copied += 1
        assert isinstance(piece, memoryview)
        for at, page in enumerate(pages):
            super().in_place([page])[0][:] = piece[at * self.block_bytes : (at + 1) * self.block_bytes]


class BrokenMemory(HostMemory):
    def in_place(self, pages: Sequence[int]) -> list[memoryview]:
        raise RuntimeError("broken on purpose")


@dataclass
class Pair:
    """Both ends of one link, on two connectors."""

    sender: Link
    receiver: Link
    lost: list[str] = field(default_factory=list)

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


@dataclass
class RankEndpoints:
    """Two connectors, one listening, and the links made between them."""

    prefill: Connector
    decode: Connector
    source: HostMemory
    target: HostMemory
    address: str
    pairs: list[Pair] = field(default_factory=list)

    async def link(self) -> Pair:
        pair = await linked(self.prefill, self.decode, self.address, self.source, self.target)
        self.pairs.append(pair)
        return pair


async def linked(
    prefill: Connector, decode: Connector, address: str, source: PageMemory, target: PageMemory
) -> Pair:
    token = os.urandom(32)
    lost: list[str] = []
    receiver = decode.expect(token, target, lambda: lost.append("receiver"))
    sender = await prefill.connect(address, token, source, lambda: lost.append("sender"))
    return Pair(sender, receiver, lost)


async def closed(pairs: list[Pair], *connectors: Connector) -> None:
    for pair in pairs:
        await pair.close()
    for connector in connectors:
        await connector.close()


async def move(pairs: list[Pair], messages: list[list[int]]) -> None:
    """Send these wire blocks through every link to the same ones, a message each, all at once."""
    moving = [
        end
        for pair in pairs
        for tag, blocks in enumerate(messages)
        for end in (pair.receiver.post_receive(tag, blocks), pair.sender.send(tag, blocks))
    ]
    await within(asyncio.gather(*moving))  # type: ignore[arg-type]


class KV(PoolMemory):
    """A worker's pool that the test can look at."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__(pool)
        self.pool = pool


def kv(
    block_size: int, tokens: int, heads: int = 4, layers: int = 3, dim: int = 8, seed: int | None = None
) -> KV:
    shape = (tokens // block_size, heads, layers, 2, block_size, dim)
    if seed is None:
        return KV(torch.zeros(shape, dtype=torch.bfloat16))
    return KV(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16())


def parts(source: KV, target: KV) -> tuple[PageMemory, PageMemory]:
    return source.part(16), target.part(16)


def logical(memory: KV) -> Tensor:
    """[heads, layers, 2, tokens, dim], whatever the block size."""
    return memory.pool.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


async def refused(ends: RankEndpoints, token: bytes) -> None:
    """Nobody gets in with this token; a connector that has no answer to wait for learns it a little later."""
    lost: list[str] = []
    try:
        link = await ends.prefill.connect(ends.address, token, ends.source, lambda: lost.append("refused"))
    except (OSError, TransferError):
        return
    await until(lambda: lost == ["refused"])
    await link.close()


@pytest.fixture
async def ends(kind: str) -> AsyncIterator[RankEndpoints]:
    before = kv_threads()
    source, target = HostMemory(64, seed=1), HostMemory(64)
    prefill, decode = make(kind), make(kind)
    address = await decode.listen("127.0.0.1", 0)
    made = RankEndpoints(prefill, decode, source, target, address)
    yield made
    for pair in made.pairs:
        await pair.close()
    await prefill.close()
    await decode.close()
    assert set(kv_threads()) <= set(before), "a thread was left behind"


class TestTransfers:
    async def test_bytes_arrive_in_the_right_pages_and_nowhere_else(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        source_pages, target_pages = [5, 6, 2, 40], [9, 3, 4, 63]
        received = pair.receiver.post_receive(7, target_pages)
        await within(pair.sender.send(7, source_pages))
        await within(received)
        for source, target in zip(source_pages, target_pages, strict=True):
            assert ends.target.page(target) == ends.source.page(source)
        untouched = set(range(64)) - set(target_pages)
        assert all(ends.target.page(page) == bytes(PAGE_BYTES) for page in untouched)

    async def test_many_messages_in_any_order_of_posting(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        pages = list(range(64))
        random.Random(3).shuffle(pages)
        posted = {tag: pair.receiver.post_receive(tag, [pages[tag]]) for tag in reversed(range(64))}
        sent = [pair.sender.send(tag, [63 - tag]) for tag in range(64)]
        await within(asyncio.gather(*sent, *posted.values()))  # type: ignore[arg-type]
        assert all(ends.target.page(pages[tag]) == ends.source.page(63 - tag) for tag in range(64))

    async def test_device_memory_is_given_to_a_library_that_reads_it_and_copied_for_others(
        self, kind: str
    ) -> None:
        source, target = DeviceMemory(64, seed=1), DeviceMemory(64)
        prefill, decode = make(kind), make(kind)
        made = RankEndpoints(prefill, decode, source, target, await decode.listen("127.0.0.1", 0))
        pair = await made.link()
        await move([pair], [[3, 4, 5], [9]])
        await closed([pair], prefill, decode)
        moved = slice(3 * PAGE_BYTES, 6 * PAGE_BYTES), slice(9 * PAGE_BYTES, 10 * PAGE_BYTES)
        assert all(target.bytes[part] == source.bytes[part] for part in moved)
        assert (source.copied, target.copied) == ((0, 0) if kind in ("ucx", "nixl") else (2, 2))

    async def test_a_message_larger_than_all_buffers(self, kind: str) -> None:
        source, target = HostMemory(2, 24 << 20, seed=2), HostMemory(2, 24 << 20)
        prefill, decode = make(kind), make(kind)
        made = RankEndpoints(prefill, decode, source, target, await decode.listen("127.0.0.1", 0))
        pair = await made.link()
        received = pair.receiver.post_receive(1, [1])
        await within(pair.sender.send(1, [0]))
        await within(received)
        assert target.page(1) == source.page(0)
        await pair.close()
        await prefill.close()
        await decode.close()

    async def test_links_do_not_share_tags(self, ends: RankEndpoints) -> None:
        first, second = await ends.link(), await ends.link()
        received = [first.receiver.post_receive(1, [10]), second.receiver.post_receive(1, [20])]
        await within(asyncio.gather(second.sender.send(1, [2]), first.sender.send(1, [1]), *received))  # type: ignore[arg-type]
        assert ends.target.page(10) == ends.source.page(1)
        assert ends.target.page(20) == ends.source.page(2)


class TestParts:
    """Pools that differ in block size, or in the heads that they hold, over links of several parts."""

    TOKENS = 256

    @pytest.mark.parametrize(("ours", "theirs"), [(64, 16), (16, 64)])
    async def test_block_sizes_may_differ(self, kind: str, ours: int, theirs: int) -> None:
        source, target = kv(ours, self.TOKENS, seed=1), kv(theirs, self.TOKENS)
        prefill, decode = make(kind), make(kind)
        address = await decode.listen("127.0.0.1", 0)
        pairs = [await linked(prefill, decode, address, source.part(16), target.part(16))]
        # Messages that share pages at the end with the larger ones.
        await move(pairs, [[0, 1, 2], [3, 4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 15]])
        for tokens in (slice(0, 14 * 16), slice(15 * 16, 16 * 16)):
            assert torch.equal(logical(target)[..., tokens, :], logical(source)[..., tokens, :])
        assert not logical(target)[..., 14 * 16 : 15 * 16, :].any(), "a block that was not sent changed"
        await closed(pairs, prefill, decode)

    @pytest.mark.deep
    @pytest.mark.parametrize(("ours", "theirs"), all_deep_but(1, [(64, 16), (16, 64), (16, 16)]))
    async def test_memory_is_bounded_by_what_is_arriving(self, kind: str, ours: int, theirs: int) -> None:
        """200 messages of 1.5 MiB, each in as many runs as blocks, so that all of them are copied."""
        source = kv(ours, 8 * 1024, heads=8, layers=12, dim=8, seed=1)
        target = kv(theirs, 8 * 1024, heads=8, layers=12, dim=8)
        prefill, decode = make(kind), make(kind)
        address = await decode.listen("127.0.0.1", 0)
        pairs = [await linked(prefill, decode, address, source.part(16), target.part(16))]
        every_second = list(range(0, 512, 2))
        random.Random(0).shuffle(every_second)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await move(pairs, [every_second[:32]] * 200)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - before < 40 << 20, "of both ends, which hold 16 MiB each"
        for block in every_second[:32]:
            tokens = slice(block * 16, (block + 1) * 16)
            assert torch.equal(logical(target)[..., tokens, :], logical(source)[..., tokens, :])
        await closed(pairs, prefill, decode)

    async def test_a_link_that_waits_for_room_can_be_closed(self, kind: str) -> None:
        source, target = kv(64, self.TOKENS, seed=1), kv(64, self.TOKENS)
        for full in ("sending", "receiving"):
            staging = {"sending": Staging(PIECE_BYTES), "receiving": Staging(PIECE_BYTES)}
            room = getattr(staging[full], full)
            taken = room.take(1, lambda: None)
            prefill, decode = make(kind, staging["sending"]), make(kind, staging["receiving"])
            pairs = [
                await linked(prefill, decode, await decode.listen("127.0.0.1", 0), *parts(source, target))
            ]
            received = asyncio.ensure_future(pairs[0].receiver.post_receive(1, [1, 2]))
            sent = asyncio.ensure_future(pairs[0].sender.send(1, [1, 2]))
            await asyncio.sleep(0.2)
            assert not received.done(), "there is no room"
            async with asyncio.timeout(WAIT_S):
                await pairs[0].close()
            assert isinstance(received.exception(), TransferError)
            assert isinstance(sent.exception(), TransferError) or full == "receiving"
            assert not target.pool.any()
            room.give_back(taken)
            await closed([], prefill, decode)

    async def test_it_goes_on_when_there_is_room_again(self, kind: str) -> None:
        source, target, staging = kv(64, self.TOKENS, seed=1), kv(64, self.TOKENS), Staging(PIECE_BYTES)
        taken = [room.take(1, lambda: None) for room in (staging.sending, staging.receiving)]
        prefill, decode = make(kind, staging), make(kind, staging)
        pairs = [await linked(prefill, decode, await decode.listen("127.0.0.1", 0), *parts(source, target))]
        moving = asyncio.create_task(move(pairs, [[1, 2], [3], [4, 7, 6]]))
        for room, memory in zip((staging.sending, staging.receiving), taken, strict=True):
            await asyncio.sleep(0.1)
            assert not moving.done()
            assert memory is not None
            room.give_back(memory)
        await moving
        for block in (1, 2, 3, 4, 7, 6):
            tokens = slice(block * 16, (block + 1) * 16)
            assert torch.equal(logical(target)[..., tokens, :], logical(source)[..., tokens, :])
        await closed(pairs, prefill, decode)

    async def test_one_sender_feeds_two_receivers_of_half_the_heads(self, kind: str) -> None:
        source = kv(16, self.TOKENS, seed=1)
        targets = [kv(16, self.TOKENS, heads=2) for _ in range(2)]
        prefill, receivers = make(kind), [make(kind) for _ in targets]
        pairs = []
        for decode, target, heads in zip(receivers, targets, (range(2), range(2, 4)), strict=True):
            address = await decode.listen("127.0.0.1", 0)
            pairs.append(
                await linked(
                    prefill,
                    decode,
                    address,
                    source.part(16, [GroupPart(heads, range(3))]),
                    target.part(16),
                )
            )
        await move(pairs, [[0, 1, 2, 3], [9, 8, 5, 6]])
        for block in (0, 1, 2, 3, 9, 8, 5, 6):
            halves = [target.pool[block] for target in targets]
            assert torch.equal(torch.cat(halves), source.pool[block])
        await closed(pairs, prefill, *receivers)

    async def test_kv_of_another_type_is_converted(self, kind: str) -> None:
        source, target = kv(16, self.TOKENS, seed=1), kv(64, self.TOKENS)
        target = KV(target.pool.to(FP8))
        prefill, decode = make(kind), make(kind)
        given, taken = source.part(16), target.part(16, None, "bfloat16")
        pairs = [await linked(prefill, decode, await decode.listen("127.0.0.1", 0), given, taken)]
        await move(pairs, [[0, 1, 2, 3], [9, 8, 5, 6, 4, 7]])
        moved = logical(source)[..., : 10 * 16, :].to(FP8)
        assert torch.equal(logical(target)[..., : 10 * 16, :].float(), moved.float())
        await closed(pairs, prefill, decode)

    async def test_two_senders_of_half_the_heads_feed_one_receiver(self, kind: str) -> None:
        sources = [kv(64, self.TOKENS, heads=2, seed=seed) for seed in (1, 2)]
        target = kv(16, self.TOKENS)
        decode, senders = make(kind), [make(kind) for _ in sources]
        address = await decode.listen("127.0.0.1", 0)
        pairs = [
            await linked(
                prefill,
                decode,
                address,
                source.part(16),
                target.part(16, [GroupPart(heads, range(3))]),
            )
            for prefill, source, heads in zip(senders, sources, (range(2), range(2, 4)), strict=True)
        ]
        await move(pairs, [[0, 1, 2, 3], [9, 8, 5, 6, 4, 7]])
        whole = torch.cat([logical(source) for source in sources])
        assert torch.equal(logical(target)[..., : 10 * 16, :], whole[..., : 10 * 16, :])
        await closed(pairs, *senders, decode)


class TestCancel:
    async def test_what_was_cancelled_is_discarded_and_what_follows_arrives(
        self, ends: RankEndpoints
    ) -> None:
        pair = await ends.link()
        cancelled, wanted = pair.receiver.post_receive(1, [1, 2]), pair.receiver.post_receive(2, [3])
        assert pair.receiver.cancel_receive(1)
        with pytest.raises(TransferError, match="cancelled"):
            await within(cancelled)
        sent = [pair.sender.send(1, [11, 12]), pair.sender.send(2, [13])]
        await within(asyncio.gather(*sent, wanted))  # type: ignore[arg-type]
        assert ends.target.page(3) == ends.source.page(13)
        assert ends.target.page(1) == ends.target.page(2) == bytes(PAGE_BYTES)

    async def test_nobody_knows_the_tag(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        assert not pair.receiver.cancel_receive(99)
        assert not pair.sender.cancel_receive(99)

    async def test_what_was_never_posted_is_never_written(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        wanted = pair.receiver.post_receive(2, [3])
        await within(asyncio.gather(pair.sender.send(1, [0, 1]), pair.sender.send(2, [2]), wanted))  # type: ignore[arg-type]
        assert ends.target.page(3) == ends.source.page(2)

    async def test_a_cancelled_receive_can_be_reused_for_other_pages(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        first = asyncio.ensure_future(pair.receiver.post_receive(1, [1]))
        pair.receiver.cancel_receive(1)
        assert isinstance(first.exception(), TransferError)
        again = pair.receiver.post_receive(2, [1])
        await within(asyncio.gather(pair.sender.send(2, [30]), again))  # type: ignore[arg-type]
        assert ends.target.page(1) == ends.source.page(30)


class TestFailure:
    async def test_a_wrong_size_ends_the_link_on_both_sides(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        received = [pair.receiver.post_receive(tag, [tag]) for tag in (1, 2)]
        # Small enough to be in the socket before the receiver objects, or not.
        await asyncio.wait([asyncio.ensure_future(pair.sender.send(1, [0, 1, 2]))], timeout=WAIT_S)
        for future in received:
            with pytest.raises(TransferError):
                await within(future)
        await until(lambda: sorted(pair.lost) == ["receiver", "sender"])
        with pytest.raises(TransferError):
            await within(pair.sender.send(3, [3]))
        assert bytes(ends.target.bytes) == bytes(len(ends.target.bytes))

    async def test_a_message_too_short_ends_the_link_on_both_sides(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        received = pair.receiver.post_receive(1, [1, 2, 3])
        await asyncio.wait([asyncio.ensure_future(pair.sender.send(1, [0, 1]))], timeout=WAIT_S)
        with pytest.raises(TransferError):
            await within(received)
        await until(lambda: sorted(pair.lost) == ["receiver", "sender"])
        assert bytes(ends.target.bytes) == bytes(len(ends.target.bytes))

    @pytest.mark.parametrize("broken", ["sender", "receiver"])
    async def test_what_a_thread_does_not_expect_ends_the_worker(self, kind: str, broken: str) -> None:
        """Pages would stay pinned for ever."""
        crashed = {"sender": asyncio.Event(), "receiver": asyncio.Event()}
        prefill, decode = (make(kind, on_crash=crashed[end].set) for end in ("sender", "receiver"))
        memory = {"sender": HostMemory(8), "receiver": HostMemory(8), broken: BrokenMemory(8)}
        address = await decode.listen("127.0.0.1", 0)
        pair = await linked(prefill, decode, address, memory["sender"], memory["receiver"])
        received = asyncio.ensure_future(pair.receiver.post_receive(1, [1]))
        sent = asyncio.ensure_future(pair.sender.send(1, [1]))
        await asyncio.wait_for(crashed[broken].wait(), WAIT_S)
        assert [end for end, event in crashed.items() if event.is_set()] == [broken]
        # The fence of the broken end may never be complete, as its worker ends instead.
        await within(pair.sender.close() if broken == "receiver" else pair.receiver.close())
        await prefill.close()
        await decode.close()
        for future in (received, sent):
            future.cancel()
        await asyncio.gather(received, sent, return_exceptions=True)

    async def test_a_token_admits_one_peer_once(self, ends: RankEndpoints) -> None:
        token = os.urandom(32)
        receiver = ends.decode.expect(token, ends.target, lambda: None)
        first = await ends.prefill.connect(ends.address, token, ends.source, lambda: None)
        received = receiver.post_receive(1, [1])
        await within(asyncio.gather(first.send(1, [1]), received))  # type: ignore[arg-type]
        await refused(ends, token)
        for link in (first, receiver):
            await link.close()

    async def test_a_token_is_worth_nothing_after_the_close(self, ends: RankEndpoints) -> None:
        token = os.urandom(32)
        receiver = ends.decode.expect(token, ends.target, lambda: None)
        await receiver.close()
        await refused(ends, token)

    async def test_strangers_who_say_nothing_hold_nobody_up(self, ends: RankEndpoints) -> None:
        host, _, port = ends.address.rpartition(":")
        idle = [await asyncio.to_thread(socket.create_connection, (host, int(port))) for _ in range(80)]
        try:
            pair = await ends.link()
            async with asyncio.timeout(HANDSHAKE_S - 0.5):
                received = pair.receiver.post_receive(1, [1])
                await asyncio.gather(pair.sender.send(1, [1]), received)
                await pair.close()
        finally:
            for stranger in idle:
                stranger.close()

    async def test_nobody_listens(self, ends: RankEndpoints) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        with pytest.raises(OSError):
            await ends.prefill.connect(f"127.0.0.1:{port}", bytes(32), ends.source, lambda: None)

    async def test_blocks_go_one_way_only(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        with pytest.raises(TransferError):
            pair.receiver.send(1, [1])
        with pytest.raises(TransferError):
            pair.sender.post_receive(1, [1])


@needs_ipv6
@pytest.mark.parametrize(("bound", "called"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
async def test_links_over_either_family(kind: str, bound: str, called: str) -> None:
    """One that listens on the wildcard of IPv6 is called by both. Bytes of UCX go as its own options say."""
    source, target = HostMemory(64, seed=1), HostMemory(64)
    prefill, decode = make(kind), make(kind)
    host, port = parse_address(await decode.listen(bound, 0))
    assert host == bound
    pair = await linked(prefill, decode, join_address(called, port), source, target)
    await move([pair], [[3, 4, 7]])
    assert [target.page(page) for page in (3, 4, 7)] == [source.page(page) for page in (3, 4, 7)]
    await closed([pair], prefill, decode)


class TestLoss:
    async def test_each_end_hears_once_that_the_other_has_gone(self, ends: RankEndpoints) -> None:
        first, second = await ends.link(), await ends.link()
        received = second.receiver.post_receive(1, [1])
        await within(asyncio.gather(second.sender.send(1, [1]), received))  # type: ignore[arg-type]
        await first.receiver.close()
        await second.sender.close()
        await until(lambda: first.lost == ["sender"] and second.lost == ["receiver"])
        await first.close()
        await second.close()
        await asyncio.sleep(0.05)
        assert (first.lost, second.lost) == (["sender"], ["receiver"])


class TestFence:
    async def test_nothing_is_taken_after_the_close(self, ends: RankEndpoints) -> None:
        pair = await ends.link()
        await pair.close()
        with pytest.raises(TransferError):
            await within(pair.sender.send(1, [1]))
        with pytest.raises(TransferError):
            await within(pair.receiver.post_receive(1, [1]))

    async def test_a_link_nobody_came_to_can_be_closed(self, ends: RankEndpoints) -> None:
        receiver = ends.decode.expect(os.urandom(32), ends.target, lambda: None)
        received = asyncio.ensure_future(receiver.post_receive(1, [1]))
        await within(asyncio.ensure_future(receiver.close()))
        assert isinstance(received.exception(), TransferError)

    async def test_a_library_that_waits_for_its_peer_holds_nothing_up(self) -> None:
        decode, token, lost = make("gloo"), os.urandom(32), list[str]()
        address = await decode.listen("127.0.0.1", 0)
        receiver = decode.expect(token, HostMemory(2), lambda: lost.append("receiver"))
        received = asyncio.ensure_future(receiver.post_receive(1, [1]))
        peer = await dial(address, GROUP_MAGIC, token)  # and nothing else of what a peer does
        await until(lambda: any(thread.name == "library-meet" for thread in threading.enumerate()))
        async with asyncio.timeout(MEET_S / 2):
            await receiver.close()
        assert isinstance(received.exception(), TransferError)
        peer.sock.close()
        await decode.close()

    async def test_a_library_gives_up_a_peer_that_never_connects(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which of two ends connects to the other follows from ports; of eight links some wait."""
        monkeypatch.setattr(torch_group, "MEET_S", 2.0)
        begun = list[socket.socket]()

        class Noted(torch_group._Pair):
            def __init__(self, backend: str, rank: int, device: int | None, sock: socket.socket) -> None:
                begun.append(sock)
                super().__init__(backend, rank, device, sock)

        monkeypatch.setattr(torch_group, "_Pair", Noted)
        decode = make("gloo")
        address = await decode.listen("127.0.0.1", 0)
        links, peers = list[Link](), list[socket.socket]()
        for number in range(1, 9):
            token = os.urandom(32)
            links.append(decode.expect(token, HostMemory(2), lambda: None))
            peers.append((await dial(address, GROUP_MAGIC, token)).sock)
            peers[-1].setblocking(True)
            await until(lambda expected=number: len(begun) == expected)  # type: ignore[misc]
            await asyncio.to_thread(say_an_address, peers[-1])
        await until(lambda: all(thread.name != "library-meet" for thread in threading.enumerate()))
        for link, peer in zip(links, peers, strict=True):
            await link.close()
            peer.close()
        await decode.close()

    @pytest.mark.skipif(not FILES.is_dir(), reason="needs /proc")
    async def test_nothing_is_left_open(self, ends: RankEndpoints) -> None:
        def open_files() -> int:
            return len(list(FILES.iterdir()))

        async def use_links(count: int) -> None:
            for _ in range(count):
                pair = await ends.link()
                await move([pair], [[1]])
                await pair.close()

        # A UCX worker opens a timer of its own, once, when its first endpoint is connected: that takes a
        # message, not only a link.
        await use_links(3)
        before, threads = open_files(), kv_threads()
        await use_links(20)
        await until(lambda: open_files() <= before and kv_threads() == threads)

    @pytest.mark.skipif(not FILES.is_dir(), reason="needs /proc")
    async def test_nothing_is_left_of_links_that_end_in_the_middle(
        self, ends: RankEndpoints, kind: str
    ) -> None:
        """Not even until somebody collects garbage. A library that waits for its peer has a timeout."""
        rng = random.Random(3)

        def left() -> tuple[int, int]:
            return len(list(FILES.iterdir())), num_threads()

        pair = await ends.link()
        await move([pair], [[1]])
        await pair.close()
        before = left()
        gc.disable()
        try:
            for number in range(16):
                pair = await ends.link()
                moves = [asyncio.ensure_future(pair.receiver.post_receive(page, [page])) for page in range(8)]
                moves += [asyncio.ensure_future(pair.sender.send(page, [page])) for page in range(8)]
                await asyncio.sleep(rng.choice((0, 0.001, 0.005, 0.02)))
                first, second = (pair.sender, pair.receiver)[:: rng.choice((1, -1))]
                await first.close()
                await asyncio.sleep(0.02 * (number % 2))
                await second.close()
                await asyncio.gather(*moves, return_exceptions=True)
            async with asyncio.timeout(WAIT_S + (MEET_S if kind == "gloo" else 0)):
                await until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))
        finally:
            gc.enable()


class Shy(LinkStore):
    """Whoever meets here tells where to find it, and hears nothing."""

    def get(self, key: str) -> bytes:
        raise TransferError("shy")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise TransferError("shy")


def say_an_address(sock: socket.socket) -> None:
    """On a slow machine the other end may have given it up already, and closed the connection."""
    with pytest.raises((TransferError, OSError), match=r"shy|Broken pipe|reset"):
        torch_group._Gloo(Shy(sock, 5.0), 1, "127.0.0.1")


@dataclass
class Other:
    """A prefill process of its own, sending one large message."""

    memory: HostMemory
    decode: Connector
    receiver: Link
    received: asyncio.Future[None]
    process: WarmProcess
    lost: list[str]

    async def until_under_way(self) -> None:
        await until(lambda: self.memory.bytes[1 << 20] != 0)

    async def close(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.process.close()
        await within(self.receiver.close())
        await self.decode.close()


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    with warm_processes():
        yield


@asynccontextmanager
async def sending(kind: str) -> AsyncIterator[Other]:
    memory, lost, token = HostMemory(1, LARGE), list[str](), os.urandom(32)
    decode = make(kind)
    address = await decode.listen("127.0.0.1", 0)
    receiver = decode.expect(token, memory, lambda: lost.append("receiver"))
    received = asyncio.ensure_future(receiver.post_receive(1, [0]))
    argv = (sender.__name__, kind, address, token.hex())
    process = WarmProcess(os.environ[ADDRESS], argv, os.environ, errors=2)
    made = Other(memory, decode, receiver, received, process, lost)
    yield made
    await made.close()


@pytest.fixture
async def other(warm: None, kind: str) -> AsyncIterator[Other]:
    async with sending(kind) as made:
        yield made


@pytest.mark.usefixtures("warm")
class TestOtherProcess:
    async def test_its_bytes_arrive(self, other: Other) -> None:
        await asyncio.wait_for(other.received, WAIT_S)
        assert other.memory.bytes.count(1) == LARGE
        assert not other.receiver.cancel_receive(1)

    @pytest.mark.deep
    async def test_its_death_is_told_once_and_ends_what_was_posted(self, other: Other) -> None:
        posted = asyncio.ensure_future(other.receiver.post_receive(2, [0]))
        await other.until_under_way()
        other.process.kill()
        async with asyncio.timeout(WAIT_S):
            await until(lambda: other.lost == ["receiver"])
        with pytest.raises(TransferError):
            await asyncio.wait_for(posted, WAIT_S)
        await within(other.receiver.close())
        assert other.received.done()
        await asyncio.sleep(0.05)
        assert other.lost == ["receiver"]

    @pytest.mark.deep
    @pytest.mark.skipif(not FILES.is_dir(), reason="needs /proc")
    async def test_its_death_in_mid_message_leaves_no_file_and_no_thread(self, kind: str) -> None:
        """Not even until somebody collects garbage."""

        def left() -> tuple[int, int]:
            return len(list(FILES.iterdir())), num_threads()

        async def see_one_die() -> None:
            async with sending(kind) as other:
                await other.until_under_way()
                other.process.kill()
                await until(lambda: other.lost == ["receiver"])

        await see_one_die()
        before = left()
        gc.disable()
        try:
            await see_one_die()
            async with asyncio.timeout(WAIT_S):
                await until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))
        finally:
            gc.enable()

    @pytest.mark.deep
    @pytest.mark.parametrize("stopped", all_deep_but(1, [False, True]), ids=["sending", "stopped"])
    async def test_nothing_is_written_after_the_close(self, other: Other, stopped: bool) -> None:
        await other.until_under_way()
        if stopped:
            other.process.send_signal(signal.SIGSTOP)
        before = not other.received.done() and not other.receiver.cancel_receive(1)
        async with asyncio.timeout(WAIT_S):
            await other.receiver.close()
        after = other.memory.bytes.count(1)
        assert other.received.done(), "a receive is over, one way or the other, when the link is closed"
        assert before or after == LARGE
        if stopped:
            other.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert other.memory.bytes.count(1) == after
        assert other.lost == []


class TestChoice:
    def test_the_best_that_both_have(self) -> None:
        ours = ("a", "b", "c")
        chosen = registry.first_common(["x", "c", "a"], ours)
        assert chosen == "c"
        assert registry.first_common(["x"], ours) is None

    @staticmethod
    def available(wanted: str, device: int | None = None) -> list[str]:
        settings = ConnectorSettings(Staging(), lambda: None, "127.0.0.1", device)
        return list(registry.available(wanted, settings))

    async def test_ucx_without_ucxx_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ucxx", None)
        monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
        with pytest.raises(ConnectorMissingError, match="pip install"):
            self.available("ucx")
        assert self.available("auto") == ["tcp", "gloo"]

    async def test_nccl_is_gloo_on_a_cpu(self) -> None:
        assert self.available("nccl") == ["gloo"]

    async def test_the_order_for_a_pool_on_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
        assert self.available("auto", device=0) == ["nccl", "tcp"]
        assert self.available("gloo", device=0) == ["nccl"]

    async def test_only_a_package_that_is_an_extra_may_be_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "baton.transport.torch_group", None)
        with pytest.raises(ImportError):
            self.available("gloo")

    @pytest.mark.parametrize(
        "name", [pytest.param(one, marks=loads_nixl if one == "nixl" else ()) for one in registry.TRANSPORTS]
    )
    async def test_every_row_is_a_connector_of_that_name(self, name: str) -> None:
        transport = registry.TRANSPORTS[name]
        if transport.package is not None and importlib.util.find_spec(transport.package) is None:
            pytest.skip(f"NOT TESTED: {transport.package} is not installed")
        settings = ConnectorSettings(Staging(), lambda: None, "127.0.0.1")
        connector: Connector = resolve_name(transport.make)(settings)
        assert connector.name == name
        await connector.close()

    def test_options_name_every_row(self) -> None:
        assert CONNECTORS == ("auto", "ucx", "nixl", "nccl", "gloo", "tcp")
        order = sorted(registry.TRANSPORTS, key=lambda name: registry.TRANSPORTS[name].preference)
        assert order == ["nixl", "ucx", "nccl", "tcp", "gloo"]
