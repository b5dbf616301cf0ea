"""What a malformed peer can do to ``nixl``: end its own link, and nothing else; and what is NIXL's own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.transport import network_interface, nixl, registry
from baton.transport.base import ConnectorMissingError, ConnectorSettings, DeviceView, Link, TransferError
from baton.transport.data_listener import TOKEN_BYTES, dial
from baton.transport.nixl_agent import HOST, AddressRange, AgentFactory, NixlAgent, peer_may_copy, span_of
from baton.transport.nixl_frames import Frame, FrameKind, Notice, cut, paired, read_frame, send_frame
from baton.transport.staging import PIECE_BYTES, Staging
from baton.transport.tcp import TcpConnector
from tests.support import sender
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory, kv_threads, until, within
from tests.support.nixl import needs_nixl
from tests.support.patience import undisturbed

pytestmark = pytest.mark.nixl

LO = {"NET_DEVICES": "lo"}
FROM_PREFILL = (FrameKind.ANNOUNCE, FrameKind.WRITTEN)
FROM_DECODE = tuple(kind for kind in FrameKind if kind not in FROM_PREFILL)


class TestFrames:
    FRAMES = (
        Frame(FrameKind.METADATA, metadata=b"opaque"),
        Frame(FrameKind.ANNOUNCE, 7, length=1 << 40),
        Frame(FrameKind.PLACE, 7, 64, 128, HOST, [AddressRange(1 << 63, 100), AddressRange(5, 28)]),
        Frame(FrameKind.REFUSED, (1 << 64) - 1),
    )

    @pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.kind.name)
    def test_come_as_they_were_sent(self, frame: Frame) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_frame(ours, frame)
            assert read_frame(theirs, tuple(FrameKind)) == frame

    @pytest.mark.parametrize(
        ("head", "why"),
        [
            ((99, False, 0, 0, 1, 0, 0), "kind 99"),
            ((FrameKind.ANNOUNCE, False, 0, 0, 1, 0, 0), "kind 2"),
            ((FrameKind.METADATA, False, 0, (1 << 20) + 1, 0, 0, 0), "1048577 bytes"),
            ((FrameKind.PLACE, False, 0, (1 << 20) + 1, 0, 0, 0), "1048577 places"),
        ],
    )
    def test_that_no_peer_sends_are_refused_before_anything_behind_them_is_read(
        self, head: tuple[int, ...], why: str
    ) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(struct.pack("!B?HIQQQ", *head))
            with pytest.raises(TransferError, match=why):
                read_frame(theirs, FROM_DECODE)

    def test_a_notice_of_another_size_is_refused(self) -> None:
        notice = Notice(1, 2, 3)
        assert Notice.of(notice.packed()) == notice
        with pytest.raises(TransferError, match="notification has 23 bytes"):
            Notice.of(notice.packed()[:-1])


class TestSpans:
    def test_are_cut(self) -> None:
        spans = [AddressRange(100, 10), AddressRange(200, 20), AddressRange(300, 5)]
        assert cut(spans, 0, 35) == spans
        assert cut(spans, 10, 20) == [AddressRange(200, 20)]
        assert cut(spans, 4, 10) == [AddressRange(104, 6), AddressRange(200, 4)]

    def test_are_paired(self) -> None:
        ours, theirs = (
            [AddressRange(0, 30)],
            [AddressRange(100, 10), AddressRange(200, 15), AddressRange(300, 5)],
        )
        assert paired(ours, theirs) == (
            [AddressRange(0, 10), AddressRange(10, 15), AddressRange(25, 5)],
            theirs,
        )
        assert paired(theirs, ours) == (
            theirs,
            [AddressRange(0, 10), AddressRange(10, 15), AddressRange(25, 5)],
        )


@pytest.mark.parametrize(
    ("tls", "may"),
    [
        ("^cma", False),
        ("^sysv,cma", False),
        ("^sm", False),
        ("^tcp", True),
        ("tcp,self", False),
        ("rc,cuda_copy,cuda_ipc,self", False),
        ("rc,sm,self", True),
        ("all", True),
        ("cma", True),
    ],
)
def test_when_a_peer_may_copy_by_itself(tls: str, may: bool) -> None:
    assert peer_may_copy(tls) == may


@dataclass
class Wire:
    """One end of a link, and the other end's socket, with which the test does what no Baton peer does."""

    link: Link
    memory: HostMemory
    sock: socket.socket
    agent: NixlAgent
    lost: list[str] = field(default_factory=list)

    def say(self, kind: FrameKind, tag: int = 0, offset: int = 0, length: int = 0, **more: object) -> None:
        send_frame(self.sock, Frame(kind, tag, offset, length, **more))  # type: ignore[arg-type]

    async def hear(self, allowed: Sequence[FrameKind]) -> Frame:
        return await asyncio.to_thread(read_frame, self.sock, allowed)


async def until_over(agent: NixlAgent, handle: int) -> None:
    await until(lambda: agent.over(handle))


@pytest.fixture
async def receiving() -> AsyncIterator[Wire]:
    """A receiving link of eight pages whose metadata the agent on the other end has met."""
    crashes, lost, token, memory = list[str](), list[str](), os.urandom(TOKEN_BYTES), HostMemory(8)
    connector = nixl.NixlConnector(Staging(), lambda: crashes.append("decode"), LO)
    address = await connector.listen("127.0.0.1", 0)
    link = connector.expect(token, memory, lambda: lost.append("receiver"))
    sock = (await dial(address, nixl._MAGIC, token)).sock
    sock.setblocking(True)
    with closing(AgentFactory(LO).make()) as agent:
        wire = Wire(link, memory, sock, agent, lost)
        agent.meet((await wire.hear(FROM_DECODE)).metadata)
        yield wire
        sock.close()
        await within(link.close())
    await connector.close()
    assert crashes == []
    assert kv_threads() == []


@pytest.fixture
async def sending() -> AsyncIterator[Wire]:
    """A sending link of eight pages, all ones, to the test's own listener."""
    crashes, lost, memory = list[str](), list[str](), HostMemory(8)
    memory.bytes[:] = b"\1" * len(memory.bytes)
    connector = nixl.NixlConnector(Staging(), lambda: crashes.append("prefill"), LO)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(AgentFactory(LO).make()) as agent:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        link = await connector.connect(address, bytes(TOKEN_BYTES), memory, lambda: lost.append("sender"))
        sock, _ = listener.accept()
        sock.recv(len(nixl._MAGIC) + TOKEN_BYTES, socket.MSG_WAITALL)
        yield Wire(link, memory, sock, agent, lost)
        sock.close()
        await within(link.close())
    await connector.close()
    assert crashes == []
    assert kv_threads() == []


@needs_nixl
class TestReceiver:
    async def test_a_message_in_parts_lands_once_all_notices_have_come(self, receiving: Wire) -> None:
        received = asyncio.ensure_future(receiving.link.post_receive(1, [2, 3, 6]))
        receiving.say(FrameKind.ANNOUNCE, 1, length=3 * PAGE_BYTES)
        place = await receiving.hear(FROM_DECODE)
        assert (place.kind, place.offset, place.length) == (FrameKind.PLACE, 0, 3 * PAGE_BYTES)
        source = memoryview(bytearray(b"x" * 3 * PAGE_BYTES))
        receiving.agent.register(source)
        for first, count in ((1, 2), (0, 1)):
            notice = Notice(1, first * PAGE_BYTES, count * PAGE_BYTES)
            ours, theirs = paired(
                [span_of(source[: notice.length])], cut(place.spans, notice.offset, notice.length)
            )
            handle = receiving.agent.write((HOST, ours), (HOST, theirs), notice.packed())
            await until_over(receiving.agent, handle)
            assert not received.done()
            receiving.say(FrameKind.WRITTEN, 1)
        await within(received)
        assert (await receiving.hear(FROM_DECODE)).kind == FrameKind.LANDED
        assert [receiving.memory.page(page) == b"x" * PAGE_BYTES for page in range(8)] == [
            page in (2, 3, 6) for page in range(8)
        ]

    async def test_a_word_of_a_notice_without_the_notice_completes_nothing(self, receiving: Wire) -> None:
        received = asyncio.ensure_future(receiving.link.post_receive(1, [2]))
        receiving.say(FrameKind.ANNOUNCE, 1, length=PAGE_BYTES)
        await receiving.hear(FROM_DECODE)
        receiving.say(FrameKind.WRITTEN, 1)
        await asyncio.sleep(0.2)
        assert not received.done()

    @pytest.mark.parametrize(
        "notices",
        [
            [Notice(2, 0, PAGE_BYTES)],
            [Notice(1, PAGE_BYTES, PAGE_BYTES + 1)],
            [Notice(1, (1 << 64) - 1, 1)],
            [Notice(1, 0, PAGE_BYTES + 1), Notice(1, 0, PAGE_BYTES)],
        ],
        ids=["of no message", "beyond its end", "far beyond", "more than there is"],
    )
    async def test_a_notice_that_does_not_fit_ends_the_link(
        self, receiving: Wire, notices: list[Notice]
    ) -> None:
        received = asyncio.ensure_future(receiving.link.post_receive(1, [2, 3]))
        receiving.say(FrameKind.ANNOUNCE, 1, length=2 * PAGE_BYTES)
        place = await receiving.hear(FROM_DECODE)
        source = memoryview(bytearray(16))
        receiving.agent.register(source)
        for notice in notices:
            there = [AddressRange(place.spans[0].address, 16)]
            handle = receiving.agent.write((HOST, [span_of(source)]), (HOST, there), notice.packed())
            await until_over(receiving.agent, handle)
            receiving.say(FrameKind.WRITTEN, 1)
        with pytest.raises(TransferError):
            await within(received)
        await until(lambda: receiving.lost == ["receiver"])

    @pytest.mark.parametrize("size", [0, PAGE_BYTES, 3 * PAGE_BYTES, 1 << 63])
    async def test_a_message_of_another_size_gets_no_place(self, receiving: Wire, size: int) -> None:
        received = asyncio.ensure_future(receiving.link.post_receive(1, [2, 3]))
        receiving.say(FrameKind.ANNOUNCE, 1, length=size)
        with pytest.raises(TransferError):
            await receiving.hear(FROM_DECODE)
        with pytest.raises(TransferError):
            await within(received)

    async def test_a_message_announced_twice_ends_the_link(self, receiving: Wire) -> None:
        received = asyncio.ensure_future(receiving.link.post_receive(1, [2]))
        for _ in range(2):
            receiving.say(FrameKind.ANNOUNCE, 1, length=PAGE_BYTES)
        with pytest.raises(TransferError):
            await within(received)

    async def test_memory_beside_the_pool_cannot_be_written_to(self, receiving: Wire) -> None:
        other = memoryview(bytearray(PAGE_BYTES))
        source = memoryview(bytearray(16))
        receiving.agent.register(source)
        with pytest.raises(TransferError, match="refused"):
            receiving.agent.write((HOST, [span_of(source)]), (HOST, [span_of(other[:16])]), b"")

    @undisturbed  # or all of it has arrived before the close
    async def test_what_is_on_its_way_at_the_close_lands_nowhere(self) -> None:
        """The peer goes on writing: its agent is told nothing."""
        memory, token = HostMemory(1, 64 << 20), os.urandom(TOKEN_BYTES)
        connector = nixl.NixlConnector(Staging(), lambda: None, LO)
        link = connector.expect(token, memory, lambda: None)
        sock = (await dial(await connector.listen("127.0.0.1", 0), nixl._MAGIC, token)).sock
        sock.setblocking(True)
        with closing(AgentFactory(LO).make()) as agent:
            agent.meet((await asyncio.to_thread(read_frame, sock, FROM_DECODE)).metadata)
            source = memoryview(bytearray(b"x" * (64 << 20)))
            agent.register(source)
            theirs = [span_of(memory.in_place([0])[0])]
            agent.write((HOST, [span_of(source)]), (HOST, theirs), b"")
            await until(lambda: memory.bytes[1 << 20] != 0)
            await within(link.close())
            after = memory.bytes.count(b"x")
            await asyncio.sleep(0.3)
            assert memory.bytes.count(b"x") == after < 64 << 20
        sock.close()
        await connector.close()


@needs_nixl
class TestSender:
    async def met(self, sending: Wire, target: HostMemory) -> None:
        metadata = sending.agent.register(target.whole())
        sending.say(FrameKind.METADATA, metadata=metadata)

    async def announced(self, sending: Wire, pages: list[int]) -> asyncio.Future[None]:
        sent = asyncio.ensure_future(sending.link.send(5, pages))
        frame = await sending.hear(FROM_PREFILL)
        assert (frame.tag, frame.length) == (5, len(pages) * PAGE_BYTES)
        return sent

    async def test_a_send_is_over_when_decode_says_that_it_landed(self, sending: Wire) -> None:
        target = HostMemory(8)
        await self.met(sending, target)
        sent = await self.announced(sending, [1, 2])
        spans = [span_of(view) for view in target.in_place([7, 0])]
        for page in range(2):
            sending.say(FrameKind.PLACE, 5, page * PAGE_BYTES, PAGE_BYTES, spans=spans[page : page + 1])
            assert (await sending.hear(FROM_PREFILL)).kind == FrameKind.WRITTEN
        await asyncio.sleep(0.1)
        assert not sent.done(), "decode may still have to copy"
        sending.say(FrameKind.LANDED, 5)
        await within(sent)
        assert [target.page(page) == b"\1" * PAGE_BYTES for page in (7, 0, 1)] == [True, True, False]

    async def test_decode_may_say_that_all_has_landed_before_this_end_hears_of_its_write(
        self, sending: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The notification reaches decode before NIXL reports it sent."""
        heard, over = threading.Event(), NixlAgent.over
        monkeypatch.setattr(NixlAgent, "over", lambda agent, handle: heard.is_set() and over(agent, handle))
        target = HostMemory(8)
        await self.met(sending, target)
        sent = await self.announced(sending, [1])
        sending.say(FrameKind.PLACE, 5, 0, PAGE_BYTES, spans=[span_of(target.in_place([3])[0])])
        sending.say(FrameKind.LANDED, 5)
        await asyncio.sleep(0.1)
        assert not sent.done(), "NIXL may still read the pages"
        heard.set()
        await within(sent)
        assert sending.lost == []

    async def test_what_was_refused_is_over(self, sending: Wire) -> None:
        await self.met(sending, HostMemory(8))
        sent = await self.announced(sending, [1])
        sending.say(FrameKind.REFUSED, 5)
        await within(sent)

    @pytest.mark.parametrize(
        ("kind", "tag", "offset", "lengths"),
        [
            (FrameKind.PLACE, 6, 0, [PAGE_BYTES]),
            (FrameKind.PLACE, 5, 0, [3 * PAGE_BYTES]),
            (FrameKind.PLACE, 5, PAGE_BYTES, [PAGE_BYTES]),
            (FrameKind.PLACE, 5, 0, [PAGE_BYTES - 1]),
            (FrameKind.PLACE, 5, 0, [PAGE_BYTES, 0]),
            (FrameKind.PLACE, 5, 0, []),
            (FrameKind.LANDED, 5, 0, []),
            (FrameKind.LANDED, 6, 0, []),
            (FrameKind.ANNOUNCE, 5, 0, []),
        ],
        ids=[
            "of no message",
            "too long",
            "out of order",
            "no whole block",
            "an empty span",
            "no span",
            "landed before it was written",
            "landed, of no message",
            "a sender's frame",
        ],
    )
    async def test_a_word_that_does_not_fit_ends_the_link(
        self, sending: Wire, kind: FrameKind, tag: int, offset: int, lengths: list[int]
    ) -> None:
        target = HostMemory(8)
        await self.met(sending, target)
        sent = await self.announced(sending, [1, 2])
        first = span_of(target.in_place([0])[0]).address
        spans = [AddressRange(first, length) for length in lengths]
        sending.say(kind, tag, offset, sum(lengths), spans=spans)
        with pytest.raises(TransferError):
            await within(sent)
        await until(lambda: sending.lost == ["sender"])
        assert not any(target.bytes)

    async def test_a_place_that_decode_has_not_registered_ends_the_link(self, sending: Wire) -> None:
        target, other = HostMemory(8), HostMemory(8)
        await self.met(sending, target)
        sent = await self.announced(sending, [1])
        sending.say(FrameKind.PLACE, 5, 0, PAGE_BYTES, spans=[span_of(other.in_place([0])[0])])
        with pytest.raises(TransferError):
            await within(sent)
        assert not any(other.bytes)

    @pytest.mark.parametrize("seed", range(4))
    async def test_malformed_metadata_ends_the_link_by_name(
        self, sending: Wire, seed: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        rng = random.Random(seed)
        with closing(AgentFactory(LO).make()) as agent:
            metadata = bytearray(agent.register(HostMemory(1).whole()))
        if seed == 0:
            metadata.clear()
        elif seed == 1:
            del metadata[rng.randrange(40, len(metadata)) :]
        else:  # the tags of NIXL's format, which has no checksum
            metadata[: 8 * seed] = rng.randbytes(8 * seed)
        sent = asyncio.ensure_future(sending.link.send(5, [1]))
        with caplog.at_level(logging.INFO):
            sending.say(FrameKind.METADATA, metadata=bytes(metadata))
            with pytest.raises(TransferError):
                await within(sent)
            await until(lambda: sending.lost == ["sender"])
        assert "the peer's NIXL metadata is malformed" in caplog.text

    async def test_metadata_of_another_agent_ends_the_link(
        self, sending: Wire, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.met(sending, HostMemory(1))
        with closing(AgentFactory(LO).make()) as another, caplog.at_level(logging.INFO):
            sending.say(FrameKind.METADATA, metadata=another.register(HostMemory(1).whole()))
            await until(lambda: sending.lost == ["sender"])
        assert "another agent's" in caplog.text

    async def test_close_ends_a_write_that_a_stopped_peer_does_not_take(self, tmp_path: Path) -> None:
        """Decode is a process of its own that places a message and then stands still."""
        memory = HostMemory(1, 64 << 20)
        connector = nixl.NixlConnector(Staging(), lambda: None, LO)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            peer = subprocess.Popen([sys.executable, "-c", PLACING, str(port)], stdout=subprocess.PIPE)  # noqa: ASYNC220
            link = await connector.connect(f"127.0.0.1:{port}", bytes(TOKEN_BYTES), memory, lambda: None)
            sock, _ = listener.accept()
            helper, _ = await asyncio.to_thread(listener.accept)
        relay = threading.Thread(target=relayed, args=(sock, helper), daemon=True)
        relay.start()
        sent = asyncio.ensure_future(link.send(1, [0]))
        assert peer.stdout is not None
        await asyncio.to_thread(peer.stdout.readline)
        peer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(WAIT_S):
            await link.close()
        assert sent.done()
        peer.kill()
        await asyncio.to_thread(peer.wait)
        peer.stdout.close()
        for end in (sock, helper):
            end.close()
        await connector.close()


PLACING = textwrap.dedent(
    """
    import socket, sys, time
    from baton.transport.nixl_agent import AgentFactory, span_of
    from baton.transport.nixl_frames import Frame, FrameKind, read_frame, send_frame
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    memory = memoryview(bytearray(64 << 20))
    agent = AgentFactory({"NET_DEVICES": "lo"}).make()
    send_frame(sock, Frame(FrameKind.METADATA, metadata=agent.register(memory)))
    size = read_frame(sock, (FrameKind.ANNOUNCE,)).length
    send_frame(sock, Frame(FrameKind.PLACE, 1, 0, size, spans=[span_of(memory)]))
    print("placed", flush=True)
    time.sleep(60)
    """
)


def relayed(prefill: socket.socket, helper: socket.socket) -> None:
    """Carry bytes both ways, but for the greeting, until either end has gone."""
    prefill.recv(len(nixl._MAGIC) + TOKEN_BYTES, socket.MSG_WAITALL)
    for ours, theirs in ((prefill, helper), (helper, prefill)):
        threading.Thread(target=carried, args=(ours, theirs), daemon=True).start()


def carried(ours: socket.socket, theirs: socket.socket) -> None:
    try:
        while some := ours.recv(1 << 16):
            theirs.sendall(some)
    except OSError:
        return


@needs_nixl
class TestPeerThatCopies:
    """Where the peer writes by itself, as cross-memory attach has it, only its end is the fence."""

    async def link(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[nixl.NixlConnector, Link, asyncio.Future[None], subprocess.Popen[bytes], HostMemory]:
        monkeypatch.setenv("UCX_TLS", "cma,tcp,self")
        memory, token = HostMemory(1, sender.LARGE), os.urandom(TOKEN_BYTES)
        connector = nixl.NixlConnector(Staging(), lambda: None, LO)
        address = await connector.listen("127.0.0.1", 0)
        link = connector.expect(token, memory, lambda: None)
        received = asyncio.ensure_future(link.post_receive(1, [0]))
        argv = (sys.executable, "-m", sender.__name__, "nixl", address, token.hex())
        return connector, link, received, subprocess.Popen(argv), memory  # noqa: ASYNC220

    @pytest.mark.deep
    @pytest.mark.parametrize("ends", ["goes on", "dies"])
    async def test_close_waits_for_a_peer_that_stands_still(
        self, monkeypatch: pytest.MonkeyPatch, ends: str
    ) -> None:
        connector, link, received, peer, memory = await self.link(monkeypatch)
        await until(lambda: memory.bytes[1 << 20] != 0)
        peer.send_signal(signal.SIGSTOP)
        closing = asyncio.ensure_future(link.close())
        await asyncio.sleep(0.5)
        assert not closing.done(), "the peer may write on"
        peer.send_signal(signal.SIGCONT if ends == "goes on" else signal.SIGKILL)
        await within(closing)
        after = memory.bytes.count(1)
        assert received.done()
        await asyncio.sleep(0.3)
        assert memory.bytes.count(1) == after
        peer.kill()
        await asyncio.to_thread(peer.wait)
        await connector.close()

    async def test_a_loss_is_told_once_and_before_the_peer_has_gone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "cma,tcp,self")
        lost, token = list[str](), os.urandom(TOKEN_BYTES)
        connector = nixl.NixlConnector(Staging(), lambda: None, LO)
        link = connector.expect(token, HostMemory(8), lambda: lost.append("receiver"))
        received = asyncio.ensure_future(link.post_receive(1, [2]))
        sock = (await dial(await connector.listen("127.0.0.1", 0), nixl._MAGIC, token)).sock
        sock.setblocking(True)
        send_frame(sock, Frame(FrameKind.LANDED))  # not what a sender says
        await until(lambda: lost == ["receiver"])
        closing = asyncio.ensure_future(link.close())
        await asyncio.sleep(0.2)
        assert not closing.done()
        assert not received.done(), "the peer may still write to the pages"
        sock.close()
        await within(closing)
        assert isinstance(received.exception(), TransferError)
        await connector.close()
        assert lost == ["receiver"]

    async def test_close_is_quick_where_the_peer_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        connector, link, received, peer, _ = await self.link(monkeypatch)
        await within(received)
        async with asyncio.timeout(WAIT_S):
            await link.close()
        peer.kill()
        await asyncio.to_thread(peer.wait)
        await connector.close()


@needs_nixl
class TestStaging:
    async def moved(self, block_bytes: int, count: int) -> Staging:
        class Copied(HostMemory):
            def whole(self) -> None:  # type: ignore[override]
                return None

        staging = Staging()
        source, target = Copied(count, block_bytes, seed=1), Copied(count, block_bytes)
        prefill, decode = (nixl.NixlConnector(staging, lambda: None, LO) for _ in range(2))
        token = os.urandom(TOKEN_BYTES)
        receiver = decode.expect(token, target, lambda: None)
        link = await prefill.connect(await decode.listen("127.0.0.1", 0), token, source, lambda: None)
        for tag in range(3):
            received = receiver.post_receive(tag, range(count))
            await within(asyncio.gather(link.send(tag, range(count)), received))  # type: ignore[arg-type]
            assert target.bytes == source.bytes
            target.bytes[:] = bytes(len(target.bytes))
        for end in (link, receiver):
            await end.close()
        for connector in (prefill, decode):
            await connector.close()
        return staging

    @pytest.mark.parametrize(("block_bytes", "count"), [(PAGE_BYTES, 2000), (PIECE_BYTES + PAGE_BYTES, 5)])
    async def test_pieces_and_blocks_larger_than_a_piece(self, block_bytes: int, count: int) -> None:
        staging = await self.moved(block_bytes, count)
        for room in (staging.sending, staging.receiving):
            assert room._held == 0


@needs_nixl
class TestLibrary:
    def test_an_idle_agent_takes_no_processor(self) -> None:
        with closing(AgentFactory(LO).make()):
            before = sum(os.times()[:2])
            threading.Event().wait(1)
            assert sum(os.times()[:2]) - before < 0.1

    def test_the_environment_is_left_as_it_was_and_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UCX_TCP_AF_PRIO", raising=False)
        monkeypatch.setenv("UCX_NET_DEVICES", "nothing0")
        factory = AgentFactory({"NET_DEVICES": "lo,eth0", "TCP_AF_PRIO": "inet6,inet"})
        environment = dict(os.environ)
        with pytest.raises(TransferError, match="UCX does not start"):
            factory.make()
        assert dict(os.environ) == environment
        monkeypatch.delenv("UCX_NET_DEVICES")
        factory.make().close()
        assert "UCX_NET_DEVICES" not in os.environ

    def test_its_package_leaves_standard_output_and_logging_alone(self) -> None:
        program = """if True:
            import logging
            from baton.transport.nixl_agent import AgentFactory
            AgentFactory({}).make().close()
            logging.getLogger("nixl.api").warning("on standard error")
            assert logging.raiseExceptions
        """
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout == ""
        assert "on standard error" in done.stderr

    def test_where_ucx_does_not_start_the_connector_is_missing_by_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "nonsense")
        with pytest.raises(ConnectorMissingError, match="NIXL does not start"):
            registry.available("nixl", settings())


def settings() -> ConnectorSettings:
    return ConnectorSettings(Staging(), lambda: None, "127.0.0.1")


class TestChoice:
    async def test_without_the_package_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl_cu13", None)
        monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", None)
        with pytest.raises(ConnectorMissingError, match=r"pip install 'baton\[nixl\]'"):
            registry.available("nixl", settings())

    @needs_nixl
    async def test_auto_takes_it_first_where_there_is_rdma_and_not_at_all_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """And then without ``ucx``: each of the two loads a UCX of its own."""
        made: dict[str, TcpConnector] = {}

        def make(name: str, settings: ConnectorSettings) -> TcpConnector:
            made[name] = TcpConnector(settings.staging, settings.on_crash)
            return made[name]

        monkeypatch.setattr(registry, "_made", make)
        monkeypatch.setattr(network_interface, "_INFINIBAND", tmp_path)
        assert next(iter(registry.available("auto", settings()))) == "ucx"
        assert "nixl" not in made
        (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
        assert network_interface.rdma_ports() == ["mlx5_0:1"]
        found = [*registry.available("auto", settings())]
        assert found[0] == "nixl" and "ucx" not in found


def test_a_device_view_has_its_own_address() -> None:
    assert span_of(DeviceView(1, 4096, 10)) == AddressRange(4096, 10)
    memory = bytearray(10)
    assert span_of(memoryview(memory)[4:]) == AddressRange(span_of(memoryview(memory)).address + 4, 6)
