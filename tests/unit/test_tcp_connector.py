"""The tcp connector over real loopback sockets: bytes in the right pages, and a close that is a fence."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from baton.connector.tcp import ReceivingLink, SendingLink, TcpConnector
from baton.connector.transport import TransferError

PAGE_BYTES = 4096
WAIT_S = 10.0
MAGIC = b"baton-tcp-1\n"
FILES = Path("/proc/self/fd")


class HostMemory:
    """``PageMemory`` over plain bytes."""

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES, seed: int | None = None) -> None:
        self._page_bytes = page_bytes
        size = num_pages * page_bytes
        self.bytes = bytearray(size if seed is None else random.Random(seed).randbytes(size))

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def source(self, pages: Sequence[int]) -> list[memoryview]:
        view = memoryview(self.bytes)
        return [view[page * self._page_bytes : (page + 1) * self._page_bytes] for page in pages]

    def target(self, pages: Sequence[int]) -> list[memoryview]:
        return self.source(pages)

    def landed(self, pages: Sequence[int], views: list[memoryview]) -> None:
        pass

    def page(self, page: int) -> bytes:
        return bytes(self.source([page])[0])


@dataclass
class Pair:
    """Both ends of one link, on two connectors."""

    source: HostMemory
    target: HostMemory
    sender: SendingLink
    receiver: ReceivingLink
    lost: list[str] = field(default_factory=list)

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


@dataclass
class Ends:
    """Two connectors, one listening, and the links made between them."""

    prefill: TcpConnector
    decode: TcpConnector
    source: HostMemory
    target: HostMemory
    address: str
    pairs: list[Pair] = field(default_factory=list)

    async def link(self) -> Pair:
        token = os.urandom(32)
        lost: list[str] = []
        receiver = self.decode.expect(token, lambda: lost.append("receiver"))
        sender = await self.prefill.connect(self.address, token, lambda: lost.append("sender"))
        assert isinstance(receiver, ReceivingLink)
        assert isinstance(sender, SendingLink)
        pair = Pair(self.source, self.target, sender, receiver, lost)
        self.pairs.append(pair)
        return pair


def kv_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


async def within(awaitable: Awaitable[None]) -> None:
    await asyncio.wait_for(asyncio.ensure_future(awaitable), WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what it waits for has no event)
            await asyncio.sleep(0.005)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    source, target = HostMemory(64, seed=1), HostMemory(64)
    prefill, decode = TcpConnector(source), TcpConnector(target)
    address = await decode.listen("127.0.0.1", 0)
    made = Ends(prefill, decode, source, target, address)
    yield made
    for pair in made.pairs:
        await pair.close()
    await prefill.close()
    await decode.close()
    assert kv_threads() == [], "a thread was left behind"


async def raw_peer(ends: Ends, lost: list[str]) -> tuple[ReceivingLink, socket.socket]:
    """A receiving link whose peer is a bare socket, to send it what no connector would."""
    token = os.urandom(32)
    receiver = ends.decode.expect(token, lambda: lost.append("receiver"))
    assert isinstance(receiver, ReceivingLink)
    host, _, port = ends.address.rpartition(":")
    peer = await asyncio.to_thread(socket.create_connection, (host, int(port)))
    peer.sendall(MAGIC + token)
    return receiver, peer


class TestTransfers:
    async def test_bytes_arrive_in_the_right_pages_and_nowhere_else(self, ends: Ends) -> None:
        pair = await ends.link()
        source_pages, target_pages = [5, 6, 2, 40], [9, 3, 4, 63]
        received = pair.receiver.post_receive(7, target_pages)
        await within(pair.sender.send(7, source_pages))
        await within(received)
        for source, target in zip(source_pages, target_pages, strict=True):
            assert ends.target.page(target) == ends.source.page(source)
        untouched = set(range(64)) - set(target_pages)
        assert all(ends.target.page(page) == bytes(PAGE_BYTES) for page in untouched)

    async def test_many_messages_in_any_order_of_posting(self, ends: Ends) -> None:
        pair = await ends.link()
        pages = list(range(64))
        random.Random(3).shuffle(pages)
        posted = {tag: pair.receiver.post_receive(tag, [pages[tag]]) for tag in reversed(range(64))}
        sent = [pair.sender.send(tag, [63 - tag]) for tag in range(64)]
        await within(asyncio.gather(*sent, *posted.values()))  # type: ignore[arg-type]
        assert all(ends.target.page(pages[tag]) == ends.source.page(63 - tag) for tag in range(64))

    async def test_completions_come_in_the_order_of_the_sends(self, ends: Ends) -> None:
        pair = await ends.link()
        order: list[tuple[str, int]] = []

        def note(kind: str, tag: int, _: asyncio.Future[None]) -> None:
            order.append((kind, tag))

        waiting: list[asyncio.Future[None]] = []
        for tag in range(20):
            received = pair.receiver.post_receive(tag, [tag])
            received.add_done_callback(partial(note, "received", tag))
            waiting.append(received)
        for tag in range(20):
            sent = pair.sender.send(tag, [tag])
            sent.add_done_callback(partial(note, "sent", tag))
            waiting.append(sent)
        await within(asyncio.gather(*waiting))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for kind in ("sent", "received"):
            assert [tag for what, tag in order if what == kind] == list(range(20))

    async def test_a_message_larger_than_all_socket_buffers(self) -> None:
        source, target = HostMemory(2, 24 << 20, seed=2), HostMemory(2, 24 << 20)
        prefill, decode = TcpConnector(source), TcpConnector(target)
        made = Ends(prefill, decode, source, target, await decode.listen("127.0.0.1", 0))
        pair = await made.link()
        received = pair.receiver.post_receive(1, [1])
        await within(pair.sender.send(1, [0]))
        await within(received)
        assert target.page(1) == source.page(0)
        await pair.close()
        await prefill.close()
        await decode.close()

    async def test_links_do_not_share_tags(self, ends: Ends) -> None:
        first, second = await ends.link(), await ends.link()
        received = [first.receiver.post_receive(1, [10]), second.receiver.post_receive(1, [20])]
        await within(asyncio.gather(second.sender.send(1, [2]), first.sender.send(1, [1]), *received))  # type: ignore[arg-type]
        assert ends.target.page(10) == ends.source.page(1)
        assert ends.target.page(20) == ends.source.page(2)


class TestCancel:
    async def test_what_was_cancelled_is_discarded_and_what_follows_arrives(self, ends: Ends) -> None:
        pair = await ends.link()
        cancelled, wanted = pair.receiver.post_receive(1, [1, 2]), pair.receiver.post_receive(2, [3])
        assert pair.receiver.cancel_receive(1)
        with pytest.raises(TransferError, match="cancelled"):
            await within(cancelled)
        sent = [pair.sender.send(1, [11, 12]), pair.sender.send(2, [13])]
        await within(asyncio.gather(*sent, wanted))  # type: ignore[arg-type]
        assert ends.target.page(3) == ends.source.page(13)
        assert ends.target.page(1) == ends.target.page(2) == bytes(PAGE_BYTES)

    async def test_nobody_knows_the_tag(self, ends: Ends) -> None:
        pair = await ends.link()
        assert not pair.receiver.cancel_receive(99)
        assert not pair.sender.cancel_receive(99)

    async def test_what_was_never_posted_is_never_written(self, ends: Ends) -> None:
        pair = await ends.link()
        wanted = pair.receiver.post_receive(2, [3])
        await within(asyncio.gather(pair.sender.send(1, [0, 1]), pair.sender.send(2, [2]), wanted))  # type: ignore[arg-type]
        assert ends.target.page(3) == ends.source.page(2)

    async def test_a_matched_receive_cannot_be_cancelled(self, ends: Ends) -> None:
        lost: list[str] = []
        receiver, peer = await raw_peer(ends, lost)
        received = receiver.post_receive(4, [8])
        peer.sendall(struct.pack("!QQ", 4, PAGE_BYTES) + b"x" * 100)
        await until(lambda: ends.target.page(8).startswith(b"x"))
        assert not receiver.cancel_receive(4)
        assert not received.done()
        peer.sendall(b"x" * (PAGE_BYTES - 100))
        await within(received)
        assert ends.target.page(8) == b"x" * PAGE_BYTES
        await receiver.close()
        peer.close()

    async def test_a_cancelled_receive_can_be_reused_for_other_pages(self, ends: Ends) -> None:
        pair = await ends.link()
        first = pair.receiver.post_receive(1, [1])
        pair.receiver.cancel_receive(1)
        assert isinstance(first.exception(), TransferError)
        again = pair.receiver.post_receive(2, [1])
        await within(asyncio.gather(pair.sender.send(2, [30]), again))  # type: ignore[arg-type]
        assert ends.target.page(1) == ends.source.page(30)


class TestFailure:
    async def test_a_wrong_size_ends_the_link_on_both_sides(self, ends: Ends) -> None:
        pair = await ends.link()
        received = [pair.receiver.post_receive(tag, [tag]) for tag in (1, 2)]
        # Small enough to be in the socket before the receiver objects, or not.
        await asyncio.wait([pair.sender.send(1, [0, 1, 2])], timeout=WAIT_S)
        for future in received:
            with pytest.raises(TransferError):
                await within(future)
        await until(lambda: sorted(pair.lost) == ["receiver", "sender"])
        with pytest.raises(TransferError):
            await within(pair.sender.send(3, [3]))
        assert bytes(ends.target.bytes) == bytes(len(ends.target.bytes))

    @pytest.mark.parametrize(
        "greeting",
        [MAGIC + bytes(32), b"something-else" + bytes(30), b"short"],
        ids=["bad token", "bad magic", "cut short"],
    )
    async def test_a_stranger_is_turned_away(self, ends: Ends, greeting: bytes) -> None:
        host, _, port = ends.address.rpartition(":")
        stranger = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        stranger.settimeout(WAIT_S)
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        try:
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        except ConnectionResetError:
            pass
        finally:
            stranger.close()
        assert kv_threads() == []

    async def test_a_token_admits_one_peer_once(self, ends: Ends) -> None:
        token = os.urandom(32)
        receiver = ends.decode.expect(token, lambda: None)
        first = await ends.prefill.connect(ends.address, token, lambda: None)
        received = receiver.post_receive(1, [1])
        await within(asyncio.gather(first.send(1, [1]), received))  # type: ignore[arg-type]
        lost: list[str] = []
        second = await ends.prefill.connect(ends.address, token, lambda: lost.append("second"))
        await until(lambda: lost == ["second"])
        for link in (first, second, receiver):
            await link.close()

    async def test_a_token_is_worth_nothing_after_the_close(self, ends: Ends) -> None:
        token = os.urandom(32)
        receiver = ends.decode.expect(token, lambda: None)
        await receiver.close()
        lost: list[str] = []
        late = await ends.prefill.connect(ends.address, token, lambda: lost.append("late"))
        await until(lambda: lost == ["late"])
        await late.close()

    async def test_strangers_who_say_nothing_hold_nobody_up(self, ends: Ends) -> None:
        host, _, port = ends.address.rpartition(":")
        idle = [await asyncio.to_thread(socket.create_connection, (host, int(port))) for _ in range(80)]
        try:
            pair = await ends.link()
            async with asyncio.timeout(3):
                received = pair.receiver.post_receive(1, [1])
                await asyncio.gather(pair.sender.send(1, [1]), received)
                await pair.close()
        finally:
            for stranger in idle:
                stranger.close()

    async def test_a_peer_that_dies_in_mid_message_fails_what_was_posted(self, ends: Ends) -> None:
        lost: list[str] = []
        receiver, peer = await raw_peer(ends, lost)
        received = [receiver.post_receive(tag, [tag]) for tag in (1, 2)]
        peer.sendall(struct.pack("!QQ", 1, PAGE_BYTES) + b"y" * 1000)
        peer.close()
        for future in received:
            with pytest.raises(TransferError):
                await within(future)
        await until(lambda: lost == ["receiver"])
        await receiver.close()
        assert lost == ["receiver"]

    async def test_nobody_listens(self, ends: Ends) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        with pytest.raises(OSError):
            await ends.prefill.connect(f"127.0.0.1:{port}", bytes(32), lambda: None)

    async def test_blocks_go_one_way_only(self, ends: Ends) -> None:
        pair = await ends.link()
        with pytest.raises(TransferError):
            pair.receiver.send(1, [1])
        with pytest.raises(TransferError):
            pair.sender.post_receive(1, [1])


class TestLoss:
    async def test_each_end_hears_once_that_the_other_has_gone(self, ends: Ends) -> None:
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

    async def test_nobody_hears_of_a_close_of_his_own(self, ends: Ends) -> None:
        lost: list[str] = []
        receiver, peer = await raw_peer(ends, lost)
        done = receiver.post_receive(1, [1])
        peer.sendall(struct.pack("!QQ", 1, PAGE_BYTES) + bytes(PAGE_BYTES))
        await within(done)
        await receiver.close()
        await receiver.close()
        await asyncio.sleep(0.05)
        assert lost == []
        peer.close()


class TestFence:
    async def test_nothing_is_written_after_close_has_returned(self, ends: Ends) -> None:
        lost: list[str] = []
        receiver, peer = await raw_peer(ends, lost)
        received = receiver.post_receive(1, list(range(64)))
        stop = threading.Event()

        def flood() -> None:
            try:
                peer.sendall(struct.pack("!QQ", 1, 64 * PAGE_BYTES))
                while not stop.is_set():
                    peer.sendall(b"z" * 512)
                    stop.wait(0.0005)
            except OSError:
                pass

        flooding = threading.Thread(target=flood)
        flooding.start()
        await until(lambda: ends.target.page(0).startswith(b"z"))
        await within(receiver.close())
        after = bytes(ends.target.bytes)
        assert kv_threads() == []
        assert isinstance(received.exception(), TransferError)
        await asyncio.sleep(0.1)
        stop.set()
        await asyncio.to_thread(flooding.join)
        peer.close()
        assert after == bytes(ends.target.bytes)
        assert after.endswith(bytes(PAGE_BYTES)), "the message was over before the close"

    async def test_close_ends_a_send_that_nobody_reads(self, ends: Ends) -> None:
        big = HostMemory(2, 32 << 20)
        prefill = TcpConnector(big)
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            port = deaf.getsockname()[1]
            sender = await prefill.connect(f"127.0.0.1:{port}", bytes(32), lambda: None)
            sent = [asyncio.ensure_future(sender.send(tag, [tag])) for tag in (0, 1)]
            await asyncio.sleep(0.05)
            assert not sent[0].done()
            await within(asyncio.ensure_future(sender.close()))
            assert all(isinstance(future.exception(), TransferError) for future in sent)
        assert kv_threads() == []

    async def test_nothing_is_taken_after_the_close(self, ends: Ends) -> None:
        pair = await ends.link()
        await pair.close()
        with pytest.raises(TransferError):
            await within(pair.sender.send(1, [1]))
        with pytest.raises(TransferError):
            await within(pair.receiver.post_receive(1, [1]))

    async def test_a_link_nobody_came_to_can_be_closed(self, ends: Ends) -> None:
        receiver = ends.decode.expect(os.urandom(32), lambda: None)
        received = asyncio.ensure_future(receiver.post_receive(1, [1]))
        await within(asyncio.ensure_future(receiver.close()))
        assert isinstance(received.exception(), TransferError)

    @pytest.mark.skipif(not FILES.is_dir(), reason="needs /proc")
    async def test_nothing_is_left_open(self, ends: Ends) -> None:
        def open_files() -> int:
            return len(list(FILES.iterdir()))

        warm = await ends.link()
        await warm.close()
        before = open_files()
        for _ in range(20):
            pair = await ends.link()
            received = pair.receiver.post_receive(1, [1])
            await within(asyncio.gather(pair.sender.send(1, [1]), received))  # type: ignore[arg-type]
            await pair.close()
        assert open_files() <= before
        assert kv_threads() == []
