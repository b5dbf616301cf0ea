"""The wire format of ``tcp``, with bare sockets as peers; what all connectors share is in test_connectors."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from baton.transport.base import TransferError
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector, TcpReceivingLink, TcpSendingLink
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory, kv_threads, until, within

MAGIC = b"baton-tcp-1\n"


@dataclass
class Pair:
    """Both ends of one link, on two connectors."""

    source: HostMemory
    target: HostMemory
    sender: TcpSendingLink
    receiver: TcpReceivingLink
    lost: list[str] = field(default_factory=list)

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


@dataclass
class RankEndpoints:
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
        receiver = self.decode.expect(token, self.target, lambda: lost.append("receiver"))
        sender = await self.prefill.connect(self.address, token, self.source, lambda: lost.append("sender"))
        assert isinstance(receiver, TcpReceivingLink)
        assert isinstance(sender, TcpSendingLink)
        pair = Pair(self.source, self.target, sender, receiver, lost)
        self.pairs.append(pair)
        return pair


@pytest.fixture
async def ends() -> AsyncIterator[RankEndpoints]:
    source, target = HostMemory(64, seed=1), HostMemory(64)
    prefill, decode = TcpConnector(Staging(), lambda: None), TcpConnector(Staging(), lambda: None)
    address = await decode.listen("127.0.0.1", 0)
    made = RankEndpoints(prefill, decode, source, target, address)
    yield made
    for pair in made.pairs:
        await pair.close()
    await prefill.close()
    await decode.close()
    assert kv_threads("Tcp") == [], "a thread was left behind"


async def raw_peer(ends: RankEndpoints, lost: list[str]) -> tuple[TcpReceivingLink, socket.socket]:
    """A receiving link whose peer is a bare socket, to send it what no connector would."""
    token = os.urandom(32)
    receiver = ends.decode.expect(token, ends.target, lambda: lost.append("receiver"))
    assert isinstance(receiver, TcpReceivingLink)
    host, _, port = ends.address.rpartition(":")
    peer = await asyncio.to_thread(socket.create_connection, (host, int(port)))
    peer.sendall(MAGIC + token)
    return receiver, peer


class TestTransfers:
    async def test_completions_come_in_the_order_of_the_sends(self, ends: RankEndpoints) -> None:
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


class TestCancel:
    async def test_a_matched_receive_cannot_be_cancelled(self, ends: RankEndpoints) -> None:
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


class TestFailure:
    @pytest.mark.parametrize(
        "greeting",
        [MAGIC + bytes(32), b"something-else" + bytes(30), b"short"],
        ids=["bad token", "bad magic", "cut short"],
    )
    async def test_a_stranger_is_turned_away(self, ends: RankEndpoints, greeting: bytes) -> None:
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
        assert kv_threads("Tcp") == []

    async def test_a_peer_that_dies_in_mid_message_fails_what_was_posted(self, ends: RankEndpoints) -> None:
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


class TestLoss:
    async def test_nobody_hears_of_a_close_of_his_own(self, ends: RankEndpoints) -> None:
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
    async def test_nothing_is_written_after_close_has_returned(self, ends: RankEndpoints) -> None:
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
        assert kv_threads("Tcp") == []
        assert isinstance(received.exception(), TransferError)
        await asyncio.sleep(0.1)
        stop.set()
        await asyncio.to_thread(flooding.join)
        peer.close()
        assert after == bytes(ends.target.bytes)
        assert after.endswith(bytes(PAGE_BYTES)), "the message was over before the close"

    async def test_close_ends_a_send_that_nobody_reads(self, ends: RankEndpoints) -> None:
        big = HostMemory(2, 32 << 20)
        prefill = TcpConnector(Staging(), lambda: None)
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            port = deaf.getsockname()[1]
            sender = await prefill.connect(f"127.0.0.1:{port}", bytes(32), big, lambda: None)
            sent = [asyncio.ensure_future(sender.send(tag, [tag])) for tag in (0, 1)]
            await asyncio.sleep(0.05)
            assert not sent[0].done()
            await within(asyncio.ensure_future(sender.close()))
            assert all(isinstance(future.exception(), TransferError) for future in sent)
        assert kv_threads("Tcp") == []
