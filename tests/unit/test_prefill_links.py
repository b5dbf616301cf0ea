"""Links to known decode workers are made in the background, others on demand, refused ones once."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import cast

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Called
from baton.handoff.messages import LinkId
from baton.handoff.wiring import Wiring
from baton.net.channels import STREAM_OPTIONS, Dialer
from baton.net.heartbeat import Pulse
from baton.roles import prefill_links as links
from baton.roles.prefill_links import DecodeLinks, DecodePeer, LinkRefusedError, UnreachableError
from baton.roles.prefill_peers import Backoff, KnownPeers, Peer
from baton.telemetry.handoff import HandoffMetrics
from baton.transport.ranks.shard import KVShard
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc
from tests.support.links import until
from tests.support.stopping_decode import KEYS

A, B = Peer("10.0.0.1:9", "a"), Peer("10.0.0.2:9", "b")


class Connection:
    """What ``DecodeLinks`` needs of a DecodePeer, without a network."""

    connector = "tcp"

    def __init__(self, peer: Peer, epoch: int, on_lost: Callable[[DecodePeer], None]) -> None:
        self.address = peer.address
        self.link = LinkId("prefill", peer.incarnation, epoch)
        self.pulse = Pulse()
        self.ended = asyncio.Event()
        self.living = asyncio.ensure_future(self.ended.wait())
        self.closing = False
        self.sent: list[pb.PrefillMessage] = []
        self._on_lost = on_lost

    def send(self, message: pb.PrefillMessage) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closing = True

    def lose(self) -> None:
        self.closing = True
        self._on_lost(cast(DecodePeer, self))
        self.ended.set()


class World:
    """Decode workers that accept, refuse or cannot be reached; and what prefill heard of its links."""

    def __init__(self) -> None:
        self.links = DecodeLinks(self.dial, self.opened, self.lost, lambda link: link in self.busy)
        self.busy: set[LinkId] = set()
        self.dials: list[Peer] = []
        self.made: list[Connection] = []
        self.open: list[LinkId] = []
        self.refuse: dict[Peer, str] = {}
        self.absent: set[Peer] = set()
        self.answer = asyncio.Event()
        self.answer.set()

    async def dial(self, peer: Peer, on_lost: Callable[[DecodePeer], None]) -> DecodePeer:
        self.dials.append(peer)
        await self.answer.wait()
        if peer in self.refuse:
            raise LinkRefusedError(self.refuse[peer])
        if peer in self.absent:
            raise UnreachableError("connection refused")
        self.made.append(Connection(peer, 1 + len(self.made), on_lost))
        return cast(DecodePeer, self.made[-1])

    def opened(self, connection: DecodePeer) -> None:
        assert connection.link is not None
        self.open.append(connection.link)

    def lost(self, link: LinkId) -> None:
        self.open.remove(link)

    async def settle(self) -> None:
        """Let every task go on until all of them wait for time or each other."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            for _ in iter(condition, True):
                await asyncio.sleep(0.005)


@pytest.fixture
async def world() -> World:
    return World()


# --- known peers and backoff


def test_a_peer_is_known_while_one_router_names_it() -> None:
    known = KnownPeers()
    known.tell("r1", [A, B])
    known.tell("r2", [B])
    known.tell("r1", [A])
    assert known.by_incarnation() == {"a": A, "b": B}
    known.forget("r2")
    assert known.by_incarnation() == {"a": A}
    assert "a" in known and "b" not in known
    known.forget("r1")
    known.forget("r1")
    assert known.by_incarnation() == {}


def test_the_number_of_peers_is_bounded_whoever_spoke_first() -> None:
    many = [Peer(f"10.0.0.1:{port}", f"i{port}") for port in range(1000, 1010)]
    forward, backward = KnownPeers(limit=4), KnownPeers(limit=4)
    for known, order in ((forward, (many[:5], many[5:])), (backward, (many[5:], many[:5]))):
        known.tell("r1", order[0])
        known.tell("r2", order[1])
    assert forward.by_incarnation() == backward.by_incarnation()
    assert len(forward.by_incarnation()) == 4


def test_pauses_double_up_to_the_longest_and_jitter() -> None:
    least, most = Backoff(draw=lambda: 0.0), Backoff(draw=lambda: 1.0)
    assert [most.pause() for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert [least.pause() for _ in range(3)] == [0.025, 0.05, 0.1]
    most.reset()
    assert most.pause() == 0.05


# --- links


async def test_known_peers_are_linked_without_a_request(world: World) -> None:
    world.links.know("r", [A, B])
    await world.settle()
    assert sorted(world.dials) == [A, B]
    link = await world.links.to(A)
    assert link in world.open
    assert len(world.dials) == 2


async def test_a_lost_link_to_a_known_peer_is_made_again(world: World) -> None:
    world.links.know("r", [A])
    await world.settle()
    world.made[0].lose()
    assert world.open == []
    await world.until(lambda: len(world.open) == 1)
    assert world.open[0].epoch == 2


async def test_an_absent_known_peer_is_called_again_until_it_is_there(world: World) -> None:
    world.absent.add(A)
    world.links.know("r", [A])
    await world.until(lambda: len(world.dials) >= 3)
    world.absent.clear()
    await world.until(lambda: len(world.open) == 1)
    await world.settle()
    calls = len(world.dials)
    await asyncio.sleep(0.1)
    assert len(world.dials) == calls


async def test_a_peer_that_is_known_no_more_is_called_no_more(world: World) -> None:
    world.absent.add(A)
    world.links.know("r", [A])
    await world.until(lambda: len(world.dials) >= 2)
    world.links.know("r", [])
    await world.settle()
    calls = len(world.dials)
    await asyncio.sleep(0.1)
    assert len(world.dials) == calls


async def test_a_link_that_keeps_breaking_is_not_made_without_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause = Backoff.pause

    def record(backoff: Backoff) -> float:
        pauses.append(pause(backoff))
        return 0.0

    monkeypatch.setattr(Backoff, "pause", record)
    world.links.know("r", [A])
    for _ in range(5):
        await world.settle()
        world.made[-1].lose()
    await world.settle()
    assert pauses[-1] > 4 * pauses[0]


async def test_all_who_ask_at_once_share_one_dial(world: World) -> None:
    world.answer.clear()
    asking = [asyncio.create_task(world.links.to(A)) for _ in range(5)]
    await world.settle()
    world.links.know("r", [A])
    await world.settle()
    world.answer.set()
    assert len(set(await asyncio.gather(*asking))) == 1
    assert world.dials == [A]


async def test_one_who_stops_waiting_takes_the_dial_from_nobody(world: World) -> None:
    world.answer.clear()
    first, second = (asyncio.create_task(world.links.to(A)) for _ in range(2))
    await world.settle()
    first.cancel()
    await world.settle()
    world.answer.set()
    assert await second in world.open


async def test_a_refused_peer_is_asked_once_and_requests_fail_with_the_reason(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.refuse[A] = "kv_dtype differs: prefill float32, decode bfloat16"
    world.links.know("r", [A])
    await world.settle()
    for _ in range(3):
        with pytest.raises(LinkRefusedError, match="kv_dtype differs"):
            await world.links.to(A)
    await asyncio.sleep(0.1)
    assert world.dials == [A]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"decode at {A.address} refused the link: {world.refuse[A]}"]

    again = Peer(A.address, "a2")  # started again, with another configuration
    world.links.know("r", [again])
    await world.settle()
    assert world.open == [LinkId("prefill", "a2", 1)]


async def test_refusals_are_remembered_of_a_bounded_number(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_PEERS", 2)
    for number in range(4):
        peer = Peer("10.0.0.1:9", f"i{number}")
        world.refuse[peer] = "model differs"
        with pytest.raises(LinkRefusedError):
            await world.links.to(peer)
    with pytest.raises(LinkRefusedError):
        await world.links.to(Peer("10.0.0.1:9", "i3"))
    assert len(world.dials) == 4, "the latest is remembered"
    with pytest.raises(LinkRefusedError):
        await world.links.to(Peer("10.0.0.1:9", "i0"))
    assert len(world.dials) == 5, "the oldest is not"


async def test_a_link_to_nobody_known_is_closed_when_no_handoff_is_open_on_it(world: World) -> None:
    link = await world.links.to(A)
    world.busy.add(link)
    world.links.tick(0.1)
    assert not world.made[0].closing
    world.busy.clear()
    world.links.tick(0.1)
    assert world.made[0].closing


async def test_a_forgotten_peers_link_is_closed_and_one_still_known_stays(world: World) -> None:
    world.links.know("r1", [A, B])
    world.links.know("r2", [B])
    await world.settle()
    world.links.forget("r1")
    world.links.tick(0.1)
    assert {c.address for c in world.made if c.closing} == {A.address}


async def test_a_link_is_not_closed_before_those_who_wait_for_it_have_it(world: World) -> None:
    world.answer.clear()
    asking = asyncio.create_task(world.links.to(A))
    await world.settle()
    world.answer.set()
    for _ in iter(lambda: bool(world.made), True):
        await asyncio.sleep(0)
    world.links.tick(0.1)
    assert not world.made[0].closing
    assert await asking in world.open


async def test_nobody_is_given_a_link_that_is_closing(world: World) -> None:
    old = await world.links.to(A)
    world.links.tick(0.1)
    assert world.made[0].closing
    asking = asyncio.create_task(world.links.to(A))
    await world.settle()
    assert not asking.done()
    world.made[0].lose()
    new = await asking
    assert new != old
    assert world.open == [new]


async def test_silence_closes_a_busy_link_long_before_an_idle_one(world: World) -> None:
    world.links.know("r", [A, B])
    await world.settle()
    busy, idle = world.made
    world.busy.add(busy.link)
    for _ in range(25):
        world.links.tick(0.1)
    assert busy.closing and not idle.closing
    assert len(idle.sent) >= 4, "heartbeats"
    for _ in range(80):
        world.links.tick(0.1)
    assert idle.closing


async def test_close_ends_links_and_dials(world: World) -> None:
    world.links.know("r", [A])
    await world.settle()
    closing = asyncio.create_task(world.links.close())
    await world.settle()
    assert world.made[0].closing
    world.made[0].lose()
    await closing
    await asyncio.sleep(0.05)
    assert world.dials == [A]


@pytest.mark.deep
async def test_a_worker_started_where_one_died_is_called_at_once() -> None:
    """However often it was called in vain: gRPC's own pauses between attempts double up to two minutes, and
    the channels of a process share them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    wiring = cast(Wiring, SimpleNamespace(dialer=Dialer(), keys=ClusterKeys(b"key")))

    async def call_until_there() -> float:
        while True:
            peer = DecodePeer(f"127.0.0.1:{port}", wiring, lambda *_: None, lambda _: None)
            try:
                await peer.open(pb.LinkOpen(prefill_incarnation="prefill"))
            except UnreachableError:
                await asyncio.sleep(0.02)
            except LinkRefusedError:
                return time.monotonic()

    async with AsyncExitStack() as stack:
        where = f"127.0.0.1:{port}"
        kept = await stack.enter_async_context(grpc.aio.insecure_channel(where, options=STREAM_OPTIONS))
        calling = asyncio.ensure_future(kept.channel_ready())  # it tries for as long as the others do
        calls = [asyncio.create_task(call_until_there()) for _ in range(3)]
        await asyncio.sleep(3.4)  # gRPC would wait from the third second to the fifth
        server = grpc.aio.server()
        pb_grpc.add_HandoffServicer_to_server(Refusing(), server)
        server.add_insecure_port(where)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        started = time.monotonic()
        assert max(await asyncio.gather(*calls)) - started < 1.0
        await calling


class Refusing(pb_grpc.HandoffServicer):
    """Decode, which will not link."""

    async def Link(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: object
    ) -> AsyncIterator[pb.DecodeMessage]:
        called = Called(ClusterKeys(b"key"), "prefill", "decode", (await anext(request_iterator)).greeting)
        yield pb.DecodeMessage(challenge=called.challenge)
        yield pb.DecodeMessage(refuse=pb.LinkRefuse(reason="not today"))


async def test_whoever_gives_up_waiting_for_links_to_end_does_not_keep_them_from_it(world: World) -> None:
    await world.links.to(A)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.links.close()
    [connection] = world.made
    assert connection.closing and not connection.living.done()
    connection.lose()
    assert await connection.living and world.open == []


class NoData:
    """What ``DecodePeer`` needs of a worker's connectors and of a data connection."""

    connectors = ("tcp",)

    async def connect(self, *terms: object) -> NoData:
        return self

    async def close(self) -> None: ...


def connections_to(port: int) -> int:
    found = psutil.Process().net_connections(kind="tcp")
    return sum(bool(one.raddr) and one.raddr.port == port and one.status == "ESTABLISHED" for one in found)


async def test_a_dial_that_met_a_stopped_process_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a turn of the garbage collector, which a worker that is busy seldom makes."""
    monkeypatch.setattr(links, "OPEN_S", 0.5)
    stops = 3
    command = (sys.executable, "-m", "tests.support.stopping_decode", str(stops))
    decode = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert decode.stdout is not None
    try:
        await dial_until_linked(decode.pid, int(await decode.stdout.readline()), stops)
    finally:
        decode.kill()
        await decode.wait()


async def dial_until_linked(pid: int, port: int, stops: int) -> None:
    metrics = HandoffMetrics(CollectorRegistry(), "prefill")
    parts = SimpleNamespace(dialer=Dialer(), keys=KEYS, ends=NoData(), whole=KVShard(()), metrics=metrics)
    wiring = cast(Wiring, parts)
    failed = 0

    async def dial(peer: Peer, on_lost: Callable[[DecodePeer], None]) -> DecodePeer:
        connection = DecodePeer(peer.address, wiring, lambda *_: None, on_lost, calls=dialling.calls)
        nonlocal failed
        try:
            await connection.open(pb.LinkOpen(prefill_incarnation="prefill"))
        except UnreachableError:
            failed += 1
            raise
        return connection

    dialling = DecodeLinks(dial, lambda _: None, lambda _: None, lambda _: False)
    gc.disable()
    try:
        dialling.know("r", [Peer(f"127.0.0.1:{port}", "decode")])
        for stop in range(stops):
            await until(lambda: failed > stop and psutil.Process(pid).status() == psutil.STATUS_STOPPED)  # noqa: B023
            os.kill(pid, signal.SIGCONT)
        await until(lambda: dialling.open_links == 1 and connections_to(port) == 1)
        assert dialling.control_channels == dialling.open_links == 1
    finally:
        gc.enable()
        await dialling.close()
    assert dialling.control_channels == 0
