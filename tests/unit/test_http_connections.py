"""What one connection may send before it is heard, and how many there may be."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.net.https import FollowingContext
from baton.router.api.errors import ApiError
from baton.router.api.http.app import create_app
from baton.router.api.http.server import connection as connection_module
from baton.router.api.http.server import http_server as server_module
from baton.router.api.http.server import listener as listener_module
from baton.router.api.http.server import slots as slots_module
from baton.router.api.http.server.connection import MAX_HEAD_BYTES, MAX_HEAD_LINES
from baton.router.api.http.server.slots import ConnectionSlots, Slot, SlotLimits
from baton.telemetry.http import HttpMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app, until
from tests.support.certificates import Authority
from tests.support.fake_ring import FakeRing
from tests.support.raw_http import connected, get, post
from tests.support.tiny_tokenizers import byte_level_tokenizer

COMPLETIONS = "/v1/completions"
FOREVER = json.dumps({"prompt": [5], "max_tokens": 200, "n": 4, "ignore_eos": True}).encode()


pytestmark = pytest.mark.both_loops


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Front:
    """The API on a port of its own."""

    def __init__(self, url: str, metrics: RouterMetrics) -> None:
        self.url = url
        self._metrics = metrics

    def refused(self, reason: str) -> float:
        count = self._metrics.registry.get_sample_value("baton_http_refused_total", {"reason": reason})
        return count or 0.0

    def has_busy(self, count: int) -> bool:
        return self.connections("busy") == count

    def connections(self, state: str) -> float | None:
        return self._metrics.registry.get_sample_value("baton_http_connections", {"state": state})


@asynccontextmanager
async def front(
    ring: FakeRing, tokenizer: Tokenizer, limits: SlotLimits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Front]:
    metrics = RouterMetrics(CollectorRegistry())
    app = create_app(ring, tokenizer, metrics=metrics)
    async with serving_app(app, limits=limits, http=metrics.http, tls=tls) as url:
        yield Front(url, metrics)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of a tenth of what it is."""
    for module in (connection_module, listener_module):
        monkeypatch.setattr(module, "HEAD_S", 0.4)
    monkeypatch.setattr(connection_module, "BODY_GRACE_S", 0.4)
    monkeypatch.setattr(connection_module, "LINGER_S", 0.4)
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)


class TestHeads:
    async def test_a_head_of_the_most_bytes_is_read(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        rest = MAX_HEAD_BYTES - len(get("/version", "x: "))
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(get("/version", "x: " + "a" * rest))
            assert (await client.answer()).status == 200

    @pytest.mark.parametrize("piece", [1 << 20, 1000], ids=["at once", "in pieces"])
    async def test_a_byte_more_is_refused(self, ring: FakeRing, tokenizer: Tokenizer, piece: int) -> None:
        head = get("/version", "x: " + "a" * (MAX_HEAD_BYTES - len(get("/version", "x: ")) + 1))
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            for start in range(0, len(head), piece):
                await client.send(head[start : start + piece])
            answer = await client.answer()
            assert answer.status == 431 and answer.error["code"] == "head_too_large"
            assert answer.headers["connection"] == "close" and answer.headers["x-request-id"]
            assert await client.end() == b""
            assert at.refused("head_bytes") == 1

    @pytest.mark.parametrize(
        "start", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\na: ", b"\r\n", b"GET / HTTP/1.1\r\na"]
    )
    async def test_what_never_ends_is_refused(
        self, ring: FakeRing, tokenizer: Tokenizer, start: bytes
    ) -> None:
        more = start[-2:] if start == b"\r\n" else b"a: b\r\n" if start[-1:] == b"\n" else b"a" * 6
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(start + more * (MAX_HEAD_BYTES // len(more) + 1))
            assert (await client.answer()).status == 431
            await client.end()

    async def test_lines_are_counted(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        lines = [f"x-{number}: a" for number in range(MAX_HEAD_LINES - 1)]
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(get("/version", *lines))
            assert (await client.answer()).status == 200, "with the host there are as many as may be"
            await client.send(get("/v1/messages", *lines, "one: more"))
            answer = await client.answer()
            assert answer.status == 431
            assert json.loads(answer.body)["type"] == "error", "in the shape of the API that was asked"
            assert "100" in json.loads(answer.body)["error"]["message"]
            assert at.refused("head_lines") == 1

    async def test_trailers_are_bounded_and_reach_nobody(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        chunk = b"%x;name=value\r\n%b\r\n0\r\n" % (len(body), body)
        async with front(ring, tokenizer) as at:
            async with connected(at.url) as client:
                await client.send(head + chunk + b"x-request-id: trailer\r\n\r\n")
                answer = await client.answer()
                assert answer.status == 200 and answer.headers["x-request-id"] != "trailer"
            for endless in (
                chunk + b"a: b\r\n" * 200,
                chunk + b"a: " + b"b" * 2 * MAX_HEAD_BYTES,
                b"1;" + b"a" * 2 * MAX_HEAD_BYTES,
            ):
                async with connected(at.url) as client:
                    await client.send(head + endless)
                    assert (await client.answer()).status == 431

    async def test_heads_in_all_are_bounded(
        self, ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("baton.router.api.http.server.slots.MAX_HEAD_BYTES", 200_000)
        async with front(ring, tokenizer) as at, AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(at.url)) for _ in range(5)]
            for client in clients:
                await client.send(b"GET / HTTP/1.1\r\na: " + b"a" * 60_000)
            await until(lambda: at.refused("evicted_silent") >= 2)
            assert at.connections("silent") == 3
            await clients[0].end()

    async def test_what_is_no_http(
        self, ring: FakeRing, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with front(ring, tokenizer) as at:
            for bytes_ in (b"\x16\x03\x01", b"nonsense\r\n\r\n", b"GET a b c HTTP/1.1\r\n\r\n"):
                async with connected(at.url) as client:
                    await client.send(bytes_)
                    answer = await client.answer()
                    assert answer.status == 400 and answer.error["code"] == "invalid_http"
            assert at.refused("malformed") == 3
            async with connected(at.url) as client:
                await client.send(get("/version", "connection: upgrade", "upgrade: websocket"))
                assert (await client.answer()).status == 200
        assert not [record for record in caplog.records if record.levelno >= logging.INFO], "logs stay empty"


@pytest.mark.usefixtures("hurried")
class TestTime:
    async def test_a_silent_connection_is_closed(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            assert await client.end(2) == b""
            assert at.refused("silent") == 1

    async def test_a_slow_head_is_told(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(get("/version"))
            assert (await client.answer()).status == 200
            await asyncio.sleep(0.6)  # between requests nothing is due
            for byte in b"GET /version HTT":
                await client.send(bytes([byte]))
                await asyncio.sleep(0.05)
            answer = await client.answer(1)
            assert answer.status == 408 and answer.error["code"] == "request_timeout"
            await client.end(1)
            assert at.refused("slow_head") == 1

    async def test_a_body_that_nobody_wants_ends(
        self, ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with front(ring, tokenizer) as at:
            async with connected(at.url) as client:
                await client.send(post("/nowhere", b"a", length=10**6))
                assert (await client.answer()).status == 404
                await client.end(2)
            monkeypatch.setattr(connection_module, "MAX_UNWANTED_BYTES", 10**6)
            async with connected(at.url) as client:
                await client.send(post("/nowhere", b"a", length=10**9))
                assert (await client.answer()).status == 404
                await client.send(b"a" * (2 * 10**6))
                await client.end(2)
            assert at.refused("unwanted_body") == 2

    async def test_a_refused_client_does_not_stay(
        self, ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with front(ring, tokenizer) as at:
            async with connected(at.url) as client:
                await client.send(b"x y z\r\n\r\n")
                assert (await client.answer()).status == 400
                await until(lambda: at.connections("silent") == 0, 2)
            monkeypatch.setattr(connection_module, "LINGER_S", 60)
            async with connected(at.url) as client:
                await client.send(b"x y z\r\n\r\n" + b"a" * (3 << 20))
                await until(lambda: at.connections("silent") == 0, 2)


class TestPipelining:
    async def test_answers_come_in_order(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        bodies = [json.dumps({"prompt": [5], "max_tokens": n}).encode() for n in (3, 5, 7)]
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(b"".join(post(COMPLETIONS, body) for body in bodies) + get("/version"))
            answers = [json.loads((await client.answer()).body) for _ in range(3)]
            assert [each["usage"]["completion_tokens"] for each in answers] == [3, 5, 7]
            assert (await client.answer()).status == 200
            await until(lambda: at.connections("idle") == 1)

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_a_client_that_leaves_cancels_all(
        self, ring: FakeRing, tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        ring.delay = 0.01
        body = json.dumps({**json.loads(FOREVER), "stream": stream}).encode()
        async with front(ring, tokenizer) as at:
            async with connected(at.url) as client:
                await client.send(post(COMPLETIONS, body))
                await until(lambda: len(ring.calls) == 4 and all(call.delivered for call in ring.calls))
                await client.send(get("/version") + post(COMPLETIONS, body))
                await asyncio.sleep(0.05)
            await until(lambda: len(ring.cancelled) == 4, 1)
            await until(lambda: at.connections("busy") == 0)
            await asyncio.sleep(0.05)
        assert len(ring.calls) == 4, "the others never start"
        assert all(call.delivered < 100 for call in ring.calls)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        "more", [get("/version") * 40, b"a" * (MAX_HEAD_BYTES + 1)], ids=["requests", "bytes"]
    )
    async def test_what_is_sent_ahead_is_bounded(
        self, ring: FakeRing, tokenizer: Tokenizer, more: bytes
    ) -> None:
        ring.delay = 0.01
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            await client.send(post(COMPLETIONS, FOREVER))
            await until(lambda: len(ring.calls) == 4)
            await client.send((post(COMPLETIONS, b"", length=10**6) if more[:1] == b"a" else b"") + more)
            await client.end(2)
            await until(lambda: len(ring.cancelled) == 4)
            assert at.refused("sent_ahead") == 1

    async def test_an_error_is_not_written_into_an_answer(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        ring.delay = 0.01
        async with front(ring, tokenizer) as at, connected(at.url) as client:
            body = json.dumps({**json.loads(FOREVER), "stream": True}).encode()
            await client.send(post(COMPLETIONS, body) + b"no request at all\r\n\r\n")
            assert await client.end(2) == b"", "nor before it, where it would be taken for the answer"
            async with connected(at.url) as client:
                await client.send(post(COMPLETIONS, body))
                await client.reader.readuntil(b"data: ")
                await client.send(b"no request at all\r\n\r\n")
                assert b"HTTP" not in await client.end(2)
            assert at.refused("malformed") == 2
            await until(lambda: at.connections("busy") == 0)


class TestRoom:
    async def test_silence_gives_way(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        async with front(ring, tokenizer, SlotLimits(10, 10)) as at, AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(at.url)) for _ in range(10)]
            await until(lambda: at.connections("silent") == 10)
            idle = []
            for _ in range(4):
                client = await stack.enter_async_context(connected(at.url))
                await client.send(get("/version"))
                assert (await client.answer()).status == 200
                idle.append(client)
            for client in silent[:4]:
                assert await client.end(1) == b"", "the oldest first"
            assert at.refused("evicted_silent") == 4
            assert (at.connections("silent"), at.connections("idle")) == (6, 4)
            for client in idle:
                await client.send(get("/version"))
                assert (await client.answer()).status == 200, "who asks stays"

    async def test_requests_do_not_give_way(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        ring.delay = 0.02
        async with front(ring, tokenizer, SlotLimits(6, 6)) as at, AsyncExitStack() as stack:
            with_loopback = 6 + 16
            busy = []
            for number in range(with_loopback):
                busy.append(await stack.enter_async_context(connected(at.url)))
                await busy[-1].send(post(COMPLETIONS, FOREVER))
                await until(partial(at.has_busy, number + 1))
            one = await stack.enter_async_context(connected(at.url))
            answer = await one.answer()
            assert answer.status == 503 and answer.error["code"] == "too_many_connections"
            assert answer.headers["retry-after"] == "1"
            await one.end()
            assert at.refused("connections") == 1
            for client in busy:
                assert (await client.answer(20)).status == 200

    async def test_three_hundred_silent_at_256_descriptors(
        self, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        open_now = _open_files()
        limits = SlotLimits.of_descriptors(256)
        async with front(ring, tokenizer, limits) as at, AsyncExitStack() as stack:
            for _ in range(300):
                await stack.enter_async_context(connected(at.url))
            async with connected(at.url) as client:
                await client.send(get("/health"))
                assert (await client.answer()).status == 200
            # Both ends are of this process, and the clients' are closed last.
            assert _open_files() - open_now - 301 <= limits.total + 16 < 256

    async def test_no_descriptor_left(
        self,
        ring: FakeRing,
        tokenizer: Tokenizer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(slots_module, "RESTED_S", 0.1)
        accept = socket.socket.accept
        calls = 0
        until_then = math.inf

        def exhausted(self: socket.socket) -> tuple[socket.socket, object]:
            nonlocal calls
            calls += 1
            if time.monotonic() < until_then:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(self)

        async with front(ring, tokenizer) as at, connected(at.url) as silent:
            await until(lambda: at.connections("silent") == 1)
            await asyncio.sleep(0.1)
            until_then = time.monotonic() + 0.5
            monkeypatch.setattr(socket.socket, "accept", exhausted)
            async with connected(at.url) as client:
                await client.send(get("/version"))
                assert (await client.answer()).status == 200
            assert await silent.end(1) == b"", "a silent one gave its descriptor"
            assert 2 <= at.refused("descriptors") <= 6, "it does not spin"
            assert calls <= 10
        assert not caplog.records

    async def test_the_last_descriptor_serves_one_client_after_the_other(
        self, ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None of them is reset, though the next ones wait to be accepted."""
        accept = socket.socket.accept

        async with front(ring, tokenizer) as at:

            def last_one(self: socket.socket) -> tuple[socket.socket, object]:
                if sum(at.connections(state) or 0 for state in ("silent", "idle", "busy")):
                    raise OSError(errno.EMFILE, "Too many open files")
                return accept(self)

            monkeypatch.setattr(socket.socket, "accept", last_one)

            async def ask() -> int:
                async with connected(at.url) as client:
                    await client.send(get("/version", "Connection: close"))
                    return (await client.answer(30)).status

            assert await asyncio.gather(*(ask() for _ in range(8))) == [200] * 8

    async def test_handshakes_count_and_end(
        self, ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, hurried: None
    ) -> None:
        authority = Authority.new(tmp_path)
        context = FollowingContext(authority.files("router", mutual=False))
        trusting = ssl.create_default_context(cafile=str(authority.pair.certificate))
        async with front(ring, tokenizer, SlotLimits(4, 4), context) as at, AsyncExitStack() as stack:
            plain = at.url.replace("https", "http")
            silent = [await stack.enter_async_context(connected(plain)) for _ in range(6)]
            await until(lambda: at.refused("evicted_silent") == 2)
            assert at.connections("silent") == 4
            async with connected(at.url, trusting) as client:
                await client.send(get("/version"))
                assert (await client.answer()).status == 200
            for client in silent:
                await client.end(2)
            assert at.refused("tls") == 3, "those that did not give way"
            async with connected(plain) as client:
                await client.send(get("/version"))
                await client.end(2)
            assert at.refused("tls") == 4
            await until(lambda: at.connections("silent") == 0)

    async def test_connections_leave_no_garbage(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        """The collector looks seldom in a router: a stranger's heads must not wait for it."""
        async with front(ring, tokenizer) as at:

            async def some() -> None:
                for sent in (get("/nowhere", "x: " + "a" * 9000), b"nonsense\r\n\r\n", b"GET /a"):
                    async with connected(at.url) as client:
                        await client.send(sent)
                        if sent != b"GET /a":
                            await client.answer()
                async with connected(at.url) as client:
                    await client.send(post(COMPLETIONS, FOREVER) + get("/version") * 2)
                    await until(lambda: at.connections("busy") == 1)
                await until(lambda: not any(map(at.connections, ("silent", "idle", "busy"))))

            await some()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await some()
                gc.collect()
                left = {type(each).__name__ for each in gc.garbage}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
        assert not left & {"Connection", "RequestResponseCycle", "Slot", "HttpRequestParser"}, left


class Held:
    """Slots, and who had to give way."""

    def __init__(self, limits: SlotLimits) -> None:
        self.slots = ConnectionSlots(limits, HttpMetrics(CollectorRegistry()))
        self.closed: list[str] = []

    def take(self, address: str, name: str = "") -> Slot:
        slot = self.slots.take(address)
        slot.close = lambda: self.closed.append(name or address)
        return slot


class TestSlots:
    def test_idle_ones_give_way_after_silent_ones(self) -> None:
        held = Held(SlotLimits(4, 4))
        idle, silent, busy, other = (held.take("10.0.0.1", name) for name in ("idle", "silent", "busy", "b"))
        for slot in (idle, busy, other):
            slot.asks()
        idle.rests()
        held.take("10.0.0.2").asks()
        held.take("10.0.0.3").asks()
        assert held.closed == ["silent", "idle"]
        with pytest.raises(ApiError) as refused:
            held.take("10.0.0.4")
        assert refused.value.status == 503
        silent.release()  # what gave way may say so again
        busy.release()
        held.take("10.0.0.4")

    def test_an_address_has_half(self) -> None:
        held = Held(SlotLimits(8, 4))
        for number in range(6):
            held.take("10.0.0.1", str(number))
        assert held.closed == ["0", "1"]
        others = [held.take(f"10.0.1.{number}") for number in range(4)]
        assert held.closed == ["0", "1"], "others have room"
        for slot in others:
            slot.asks()
        held.take("10.0.2.1")
        assert held.closed == ["0", "1", "2"]

    def test_an_address_with_requests_is_refused_alone(self) -> None:
        held = Held(SlotLimits(8, 4))
        for _ in range(4):
            held.take("10.0.0.1").asks()
        with pytest.raises(ApiError, match="this address"):
            held.take("10.0.0.1")
        held.take("10.0.0.2")
        assert not held.closed

    @pytest.mark.parametrize(
        ("one", "other", "alike"),
        [
            ("2001:db8::1", "2001:db8::ffff:2", True),
            ("2001:db8::1", "2001:db8:0:1::1", False),
            ("::ffff:10.0.0.1", "10.0.0.1", True),
            ("fe80::1%eth0", "fe80::2%eth0", True),
        ],
    )
    def test_addresses_of_a_network(self, one: str, other: str, alike: bool) -> None:
        held = Held(SlotLimits(4, 1))
        held.take(one).asks()
        if not alike:
            held.take(other)
            return
        with pytest.raises(ApiError):
            held.take(other)

    @pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", ""])
    def test_the_machine_itself_finds_room(self, address: str) -> None:
        held = Held(SlotLimits(2, 1))
        for _ in range(2 + 16):
            held.take(address).asks()
        with pytest.raises(ApiError, match="too many requests"):
            held.take(address)

    def test_who_came_a_moment_ago_makes_no_room(self) -> None:
        """What it has sent need not have been read."""
        now = 100.0
        slots = ConnectionSlots(SlotLimits(8, 8), HttpMetrics(CollectorRegistry()), lambda: now)
        closed: list[str] = []
        first, second = slots.take("10.0.0.1"), slots.take("10.0.0.2")
        first.close = partial(closed.append, "first")
        second.close = partial(closed.append, "second")
        slots.make_room()
        assert not closed
        now += slots_module.RESTED_S
        second.asks()
        second.rests()
        slots.make_room()
        slots.make_room()
        assert closed == ["first"]

    @pytest.mark.parametrize(("descriptors", "total"), [(16, 16), (256, 192), (1024, 819), (1 << 20, 16384)])
    def test_some_descriptors_are_set_aside(self, descriptors: int, total: int) -> None:
        assert SlotLimits.of_descriptors(descriptors) == SlotLimits(total, round(total / 2))


async def test_the_soft_limit_is_raised() -> None:
    program = (
        "import resource as r; from baton.process.descriptors import raise_limit;"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 300)); print(raise_limit(), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert said.decode().split() == ["300", "(300,", "300)"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /version HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\nHost:\r\n\r\n", 200),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
    ],
)
async def test_a_request_has_one_host(ring: FakeRing, tokenizer: Tokenizer, head: bytes, status: int) -> None:
    async with front(ring, tokenizer) as at, connected(at.url) as client:
        await client.send(head)
        answer = await client.answer()
        assert answer.status == status
        if status == 400:
            assert answer.error["param"] == "host"
            assert at.refused("malformed") == 1
