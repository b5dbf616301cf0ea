"""The data port of ``tcp`` under TLS: who gets in, who does not and what he is told, and what goes over the
wire. That bytes arrive, and all the rest that connectors do, is in test_connectors."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.net.certificates import TlsFiles
from baton.net.tls_session import DataTls, TlsSession
from baton.process.options import ConfigError, parse_address
from baton.transport import data_listener as door
from baton.transport import registry
from baton.transport.base import ConnectorSettings, Link, TransferError
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from tests.support.certificates import Authority
from tests.support.ipv6 import needs_ipv6
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory, kv_threads, until, within

MAGIC = b"baton-tcp-1\n"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("theirs"), "stranger")


@pytest.fixture(scope="module")
def files(ours: Authority) -> TlsFiles:
    return ours.files("kv")


def connector(files: TlsFiles | None) -> TcpConnector:
    return TcpConnector(Staging(), lambda: None, None if files is None else DataTls(files))


@dataclass
class Decode:
    """A worker that listens, and pages that a link of it fills."""

    connector: TcpConnector
    address: str
    target: HostMemory = field(default_factory=lambda: HostMemory(64))
    lost: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def expect(self) -> tuple[bytes, Link]:
        token = os.urandom(door.TOKEN_BYTES)
        link = self.connector.expect(token, self.target, lambda: self.lost.append("receiver"))
        self.links.append(link)
        return token, link

    @property
    def port(self) -> int:
        return parse_address(self.address)[1]


@asynccontextmanager
async def decode(files: TlsFiles | None, host: str = "127.0.0.1") -> AsyncIterator[Decode]:
    made = connector(files)
    running = Decode(made, await made.listen(host, 0))
    try:
        yield running
    finally:
        for link in running.links:
            await link.close()
        await made.close()
    assert kv_threads("Tcp") == [], "a thread was left behind"


async def moved(decode: Decode, files: TlsFiles | None, address: str | None = None) -> None:
    """A page goes from a worker with these files to ``decode``."""
    prefill, source = connector(files), HostMemory(64, seed=1)
    token, receiver = decode.expect()
    sender = await prefill.connect(address or decode.address, token, source, lambda: None)
    received = receiver.post_receive(1, [3])
    await within(asyncio.gather(sender.send(1, [5]), received))  # type: ignore[arg-type]
    assert decode.target.page(3) == source.page(5)
    await receiver.close()  # by itself, so that it is not lost
    await sender.close()
    await prefill.close()


async def refused(decode: Decode, files: TlsFiles | None) -> str:
    """What a worker with these files is told. The token that it shows is a good one."""
    prefill = connector(files)
    token, _ = decode.expect()
    lost: list[str] = []
    try:
        sender = await prefill.connect(
            decode.address, token, HostMemory(64, seed=1), lambda: lost.append("sender")
        )
    except TransferError as error:
        return str(error)
    finally:
        await prefill.close()
    await until(lambda: lost == ["sender"])
    await sender.close()
    return "the link was lost"


class TestWhoGetsIn:
    async def test_who_has_a_certificate_of_the_authority(self, ours: Authority, files: TlsFiles) -> None:
        async with decode(files) as running:
            await moved(running, ours.files("prefill"))

    @needs_ipv6
    async def test_over_ipv6(self, files: TlsFiles) -> None:
        async with decode(files, "::1") as running:
            assert running.address.startswith("[::1]:")
            await moved(running, files)

    async def test_a_name_for_all_services(self, ours: Authority) -> None:
        named = dataclasses.replace(
            ours.files("all", hosts="DNS:baton.internal"), server_name="baton.internal"
        )
        async with decode(named) as running:
            await moved(running, named)

    async def test_not_a_caller_of_another_authority(
        self, ours: Authority, theirs: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
    ) -> None:
        trusting = dataclasses.replace(theirs.files("caller"), ca=str(ours.pair.certificate))
        async with decode(files) as running:
            assert "no TLS with the data port" in await refused(running, trusting)
            assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
            await moved(running, files)

    async def test_not_a_data_port_of_another_authority(
        self, ours: Authority, theirs: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with decode(theirs.files("called")) as running:
            assert "certificate verify failed" in await refused(running, ours.files("calling"))
            await until(lambda: "ALERT_UNKNOWN_CA" in caplog.text)

    async def test_not_a_data_port_with_the_certificate_of_another_host(self, ours: Authority) -> None:
        elsewhere = ours.files("elsewhere", hosts="IP:192.0.2.7")
        async with decode(elsewhere) as running:
            assert "IP address mismatch" in await refused(running, elsewhere)

    async def test_nobody_without_tls(self, files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
        async with decode(files) as running:
            assert await refused(running, None) == "the link was lost"
            assert "it speaks no TLS: does its worker have --worker-tls-certfile?" in caplog.text
            await moved(running, files)

    async def test_nobody_with_tls_where_there_is_none(
        self, files: TlsFiles, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with decode(None) as running:
            assert "does its worker have --worker-tls-certfile?" in await refused(running, files)
            assert "it speaks TLS, and this worker has no --worker-tls-certfile" in caplog.text
            await moved(running, None)

    @pytest.mark.parametrize("kind", ["no certificate", "TLS 1.2"])
    async def test_no_client_of_another_kind(
        self, kind: str, files: TlsFiles, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that shows the right token all the same."""
        context = ssl.create_default_context(cafile=files.ca)
        if kind == "TLS 1.2":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(files.certificate, files.key)
        async with decode(files) as running:
            token, _ = running.expect()
            assert not await asyncio.to_thread(welcomed, running.port, context, token)
            assert (
                "PEER_DID_NOT_RETURN" if kind == "no certificate" else "UNSUPPORTED_PROTOCOL"
            ) in caplog.text

    async def test_nobody_without_a_token(self, files: TlsFiles) -> None:
        context = files.client_context()
        async with decode(files) as running:
            token, _ = running.expect()
            assert not await asyncio.to_thread(welcomed, running.port, context, bytes(32))
            assert await asyncio.to_thread(welcomed, running.port, context, token)
            assert not await asyncio.to_thread(welcomed, running.port, context, token), "once"


def welcomed(port: int, context: ssl.SSLContext, token: bytes) -> bool:
    """What comes of a peer that is no connector."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        try:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
                tls.sendall(MAGIC + token)
                return tls.recv(2) == b"+"
        except OSError:  # ssl's own are some
            return False


ELSEWHERE = "127.0.0.2"
"""Another address of this machine."""


def called_from(host: str, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S, source_address=(host, 0))


class TestStrangers:
    @staticmethod
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    @staticmethod
    def threads() -> set[str]:
        """But those of the event loop's own pool, which this test makes use of."""
        return {each.name for each in threading.enumerate() if not each.name.startswith("asyncio_")}

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
    @pytest.mark.parametrize("says", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
    async def test_one_who_never_ends_the_greeting_is_sent_away(
        self, says: bytes, files: TlsFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(door, "HANDSHAKE_S", 0.5)
        async with decode(files) as running:
            await moved(running, files)
            threads, before = self.threads(), self.descriptors()
            strangers = [socket.create_connection(("127.0.0.1", running.port), WAIT_S) for _ in range(20)]
            for stranger in strangers:
                stranger.sendall(says)
            await until(lambda: running.connector._listener.refused == 20)
            assert caplog.text.count("it took more than 0.5 s") == 1, "a line in ten seconds"
            for stranger in strangers:
                with closing(stranger):
                    assert await asyncio.to_thread(stranger.recv, 1) == b""
            await until(lambda: self.descriptors() == before)
            assert self.threads() == threads
            await moved(running, files)

    async def test_of_too_many_the_oldest_goes(
        self, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(door, "MAX_GREETINGS", 8)
        async with decode(files) as running:
            strangers = [socket.create_connection(("127.0.0.1", running.port), WAIT_S) for _ in range(20)]
            try:
                for first in strangers[:12]:
                    assert await asyncio.to_thread(first.recv, 1) == b""
                await moved(running, files)
            finally:
                for stranger in strangers:
                    stranger.close()

    async def test_the_oldest_of_whoever_has_most_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(door, "MAX_GREETINGS", 8)
        async with decode(None) as running:
            token, _ = running.expect()
            with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as slow:
                strangers = [called_from(ELSEWHERE, running.port) for _ in range(20)]
                for first in strangers[:13]:
                    assert await asyncio.to_thread(first.recv, 1) == b""
                slow.sendall(MAGIC + token)
                await until(lambda: token not in running.connector._expected)
                for stranger in strangers:
                    stranger.close()

    async def test_one_address_has_a_share_of_the_greetings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(door, "MAX_FROM_ONE", 4)
        async with decode(None) as running:
            strangers = [called_from(ELSEWHERE, running.port) for _ in range(10)]
            for first in strangers[:6]:
                assert await asyncio.to_thread(first.recv, 1) == b""
            await until(lambda: len(running.connector._listener._greetings) == 4)
            for stranger in strangers:
                stranger.close()

    async def test_handshakes_of_a_flood_delay_no_one_from_another_address(
        self, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A peer's handshake waits for a step of each other address, however many steps wait there."""
        hello = DataTls(files).calling("127.0.0.1")
        assert not hello.greet()
        said, greet, steps = hello.take(), TlsSession.greet, 0

        def slow(session: TlsSession) -> bool:
            nonlocal steps
            if threading.current_thread().name.startswith("door-tls"):
                steps += 1
                time.sleep(0.05)
            return greet(session)

        monkeypatch.setattr(TlsSession, "greet", slow)
        async with decode(files) as running:
            flood = [called_from(ELSEWHERE, running.port) for _ in range(60)]
            for stranger in flood:
                stranger.sendall(said)
            await until(lambda: steps > 0)
            await moved(running, files)
            assert steps < 40, "of the 60 that waited"
            for stranger in flood:
                stranger.close()

    async def test_what_is_no_tls_at_all_is_turned_away(self, files: TlsFiles) -> None:
        async with decode(files) as running:
            for noise in (random.Random(1).randbytes(1000), b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(32)):
                with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as stranger:
                    stranger.sendall(noise)
                    await asyncio.to_thread(to_the_end, stranger)
            await moved(running, files)


def to_the_end(sock: socket.socket) -> None:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


class TestTheWire:
    @staticmethod
    @asynccontextmanager
    async def relay(port: int, change: Callable[[bytes], bytes]) -> AsyncIterator[int]:
        """What stands between the two, and may ``change`` what prefill says."""

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bool) -> None:
            while data := await reader.read(1 << 16):
                writer.write(change(data) if seen else data)
                await writer.drain()
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, back, True), pump(there, writer, False), return_exceptions=True)

        server = await asyncio.start_server(between, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def test_nobody_on_the_way_sees_what_is_sent(self, files: TlsFiles) -> None:
        seen = bytearray()

        def note(data: bytes) -> bytes:
            seen.extend(data)
            return data

        async with decode(files) as running, self.relay(running.port, note) as port:
            await moved(running, files, f"127.0.0.1:{port}")
            page = HostMemory(64, seed=1).page(5)
        assert len(seen) > PAGE_BYTES
        assert not any(page[at : at + 16] in seen for at in range(0, PAGE_BYTES, 16))

    async def test_a_bit_that_is_changed_on_the_way_ends_the_link(self, files: TlsFiles) -> None:
        sent = 0

        def flip(data: bytes) -> bytes:
            nonlocal sent
            sent += len(data)
            late = sent > 16 * PAGE_BYTES
            return data[:-1] + bytes([data[-1] ^ 1]) if late else data

        source = HostMemory(64, seed=1)
        async with decode(files) as running, self.relay(running.port, flip) as port:
            prefill = connector(files)
            token, receiver = running.expect()
            sender = await prefill.connect(f"127.0.0.1:{port}", token, source, lambda: None)
            received = receiver.post_receive(1, list(range(64)))
            sending = asyncio.ensure_future(sender.send(1, list(range(64))))
            with pytest.raises(TransferError):
                await within(received)
            await until(lambda: running.lost == ["receiver"])
            await sender.close()
            await prefill.close()
            await asyncio.wait([sending])
            there, sent_bytes = bytes(running.target.bytes), bytes(source.bytes)
            whole = next(
                at for at, pair in enumerate(zip(there, sent_bytes, strict=True)) if len({*pair}) == 2
            )
            assert 0 < whole < len(sent_bytes)
            assert not any(there[whole:]), "what was changed came to a page"


def swap(files: Mapping[str | None, Path]) -> None:
    """Put others in their places."""
    for path, new in files.items():
        shutil.copy(new, f"{path}.new")
        Path(f"{path}.new").rename(str(path))


class TestNewFiles:
    async def test_they_are_for_new_links_and_open_ones_go_on(
        self, tmp_path: Path, ours: Authority, theirs: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        both = ours.files("both")
        ca = tmp_path / "ca.crt"
        shutil.copy(ours.pair.certificate, ca)
        here = dataclasses.replace(both, ca=str(ca))
        async with decode(here) as running:
            source = HostMemory(64, seed=1)
            prefill = connector(here)
            token, receiver = running.expect()
            sender = await prefill.connect(running.address, token, source, lambda: None)
            replaced = theirs.sign("both")
            await asyncio.to_thread(
                swap,
                {
                    here.ca: theirs.pair.certificate,
                    here.certificate: replaced.certificate,
                    here.key: replaced.key,
                },
            )
            await moved(running, theirs.files("another"))
            assert "is read again" in caplog.text
            assert "no TLS with the data port" in await refused(running, ours.files("before"))
            received = receiver.post_receive(9, [9])
            await within(asyncio.gather(sender.send(9, [9]), received))  # type: ignore[arg-type]
            assert running.target.page(9) == source.page(9)
            assert running.lost == []
            await sender.close()
            await prefill.close()

    async def test_files_that_cannot_be_used_leave_those_before(
        self, ours: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken = ours.files("broken")
        async with decode(broken) as running:
            await asyncio.to_thread(Path(broken.certificate).write_text, "broken")
            await moved(running, ours.files("good"))
            assert "cannot be used" in caplog.text

    def test_files_that_cannot_be_used_at_first(self, tmp_path: Path, files: TlsFiles) -> None:
        with pytest.raises(ConfigError, match="--worker-tls-certfile"):
            DataTls(dataclasses.replace(files, certificate=str(tmp_path / "nothing")))


class TestChoice:
    @staticmethod
    async def available(wanted: str, tls: TlsFiles | None) -> list[str]:
        settings = ConnectorSettings(Staging(), lambda: None, "127.0.0.1", tls=tls)
        found = registry.available(wanted, settings)
        for connector in found.values():
            await connector.close()
        return list(found)

    async def test_what_is_encrypted_unless_another_is_asked_for(self, files: TlsFiles) -> None:
        assert await self.available("auto", files) == await self.available("tcp", files) == ["tcp"]
        assert await self.available("gloo", files) == ["gloo"]
        assert "gloo" in await self.available("auto", None)
        assert kv_threads("Tcp") == []

    def test_what_a_worker_tells_of_it(self, files: TlsFiles) -> None:
        assert registry.encryption("auto", files) == registry.encryption("tcp", files) == "TLS 1.3"
        for wanted in ("ucx", "gloo", "nccl"):
            assert registry.encryption(wanted, files) == ""
        assert registry.encryption("auto", None) == registry.encryption("tcp", None) == ""
