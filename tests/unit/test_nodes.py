"""Nodes join a worker's leader over real sockets: who may, who may not, and how they end together."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import __version__, hub
from baton.greeting.cluster_key import ClusterKeys
from baton.nodes import handshake
from baton.nodes.config import NodeConfig
from baton.nodes.handshake import HandshakeError, WrongKeyError
from baton.nodes.health import Health
from baton.nodes.leader import Leader, NodeTerms
from baton.nodes.messages import (
    Attach,
    End,
    Found,
    Join,
    Leaving,
    NodeBeat,
    NotFound,
    RankEnded,
    Refused,
    Serving,
    Started,
    StartRanks,
    ToLeader,
    ToNode,
    Welcome,
    to_leader,
)
from baton.nodes.node import EXIT_CRASHED, Node
from baton.parallel import processes
from baton.parallel.channel import Channel, ChannelClosedError
from baton.parallel.layout import Layout
from baton.parallel.ranks import RankError, RemoteRanks
from baton.process.options import ConfigError, StartError, join_address
from baton.transport.ranks.endpoint import RankAddress
from baton.worker.config import WorkerConfig
from tests.support.ipv6 import needs_ipv6

KEY = b"the key"
KEYS = ClusterKeys(KEY)
REVISION = "0123456789abcdef"


class TestLayout:
    @given(st.integers(1, 32), st.integers(1, 8), st.integers(1, 16))
    def test_every_rank_is_on_one_node(self, tp: int, pp: int, nodes: int) -> None:
        try:
            layout = Layout.of(tp, pp, nodes)
        except ValueError as error:
            per_node = tp * pp / nodes
            uneven = per_node != int(per_node)
            assert uneven or (per_node % tp and tp % per_node), str(error)
            return
        assert list(chain(*(layout.ranks_of(node) for node in range(nodes)))) == list(range(tp * pp))
        for node in range(nodes):
            assert [layout.place_of(rank) for rank in layout.ranks_of(node)] == list(range(layout.per_node))

    @given(st.integers(1, 8), st.integers(1, 8))
    def test_a_group_that_fits_into_a_node_is_within_it(self, tp: int, pp: int) -> None:
        """One stage or several on each."""
        for nodes in range(1, pp + 1):
            if pp % nodes == 0:
                layout = Layout.of(tp, pp, nodes)
                groups = [set(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)]
                ranks = [set(layout.ranks_of(node)) for node in range(nodes)]
                assert all(any(group <= each for each in ranks) for group in groups)

    def test_what_does_not_fit_says_what_does(self) -> None:
        with pytest.raises(ValueError, match="nodes is 3; allowed for tensor_parallel_size 8 and ") as error:
            Layout.of(8, 2, 3)
        assert str(error.value).endswith("pipeline_parallel_size 2: 1, 2, 4, 8, 16")
        with pytest.raises(ValueError, match=r"allowed .*: 1, 3, 6$"):
            Layout.of(2, 3, 2)  # a node would have one group and half of another


class TestOptions:
    def test_nodes_need_a_key(self) -> None:
        with pytest.raises(ConfigError, match="--nodes: 2 need a --cluster-key"):
            WorkerConfig(role="both", tensor_parallel_size=2, nodes=2)

    def test_nodes_share_the_ranks_out_evenly(self) -> None:
        with pytest.raises(ConfigError, match=r"--nodes: nodes is 3; allowed .*: 1, 2, 4"):
            WorkerConfig(role="both", tensor_parallel_size=4, nodes=3, cluster_key="k")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"cluster_key": ""}, "--cluster-key: is needed"),
            ({"node_index": 0}, "--node-index: must be at least 1, not 0"),
            ({"node_index": 2}, "--node-index: must be at most 1, not 2"),
            ({"nodes": 1}, "--nodes: must be at least 2, not 1"),
            ({"leader_address": ""}, "--leader-address: must not be empty"),
        ],
    )
    def test_a_node_has_what_it_needs(self, given: dict[str, object], message: str) -> None:
        right: dict[str, object] = {"leader_address": "h", "nodes": 2, "node_index": 1, "cluster_key": "k"}
        with pytest.raises(ConfigError, match=message):
            NodeConfig(**{**right, **given})  # type: ignore[arg-type]


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        yield ours, theirs


def meeting(joins: Callable[[], None], admits: Callable[[], None]) -> tuple[object, object]:
    """What each side raises, or None."""
    with ThreadPoolExecutor() as pool:
        sides = pool.submit(joins), pool.submit(admits)
        return sides[0].exception(), sides[1].exception()


class TestHandshake:
    def test_of_one_key(self) -> None:
        with connection() as (joining, leading):
            ends = meeting(lambda: handshake.join(joining, KEYS), lambda: handshake.admit(leading, KEYS))
        assert ends == (None, None)

    @pytest.mark.parametrize(
        ("joins", "leads"),
        [
            (ClusterKeys(b"new", KEY), KEYS),
            (KEYS, ClusterKeys(b"new", KEY)),
            (ClusterKeys(b"new", KEY), ClusterKeys(b"new")),
            (ClusterKeys(b"newer", b"new"), ClusterKeys(b"new", KEY)),
        ],
    )
    def test_of_two_generations_with_one_key_in_common(self, joins: ClusterKeys, leads: ClusterKeys) -> None:
        with connection() as (joining, leading):
            ends = meeting(lambda: handshake.join(joining, joins), lambda: handshake.admit(leading, leads))
        assert ends == (None, None)

    def test_a_leader_with_another_key_is_found_out_first(self) -> None:
        def join(sock: socket.socket) -> None:
            with sock:
                handshake.join(sock, KEYS)

        with connection() as (joining, leading):
            mine, its = meeting(
                lambda: join(joining), lambda: handshake.admit(leading, ClusterKeys(b"another"))
            )
        assert isinstance(mine, WrongKeyError)
        assert "another cluster key" in str(mine)
        assert isinstance(its, HandshakeError)
        assert "closed the connection" in str(its), "it got no proof to try keys on"

    def test_a_node_with_another_key(self) -> None:
        with connection() as (joining, leading):

            def stranger() -> None:
                joining.sendall(handshake.MAGIC + bytes(32))
                joining.recv(64, socket.MSG_WAITALL)
                joining.sendall(bytes(32))

            _, its = meeting(stranger, lambda: handshake.admit(leading, KEYS))
        assert isinstance(its, WrongKeyError)

    def test_a_leaders_proof_cannot_be_sent_back(self) -> None:
        """A stranger that says the leader's own nonce and proof to it, in another connection."""
        with connection() as (joining, leading):

            def mirror() -> None:
                joining.sendall(handshake.MAGIC + bytes(32))
                answer = joining.recv(64, socket.MSG_WAITALL)
                joining.sendall(answer[32:])

            _, its = meeting(mirror, lambda: handshake.admit(leading, KEYS))
        assert isinstance(its, WrongKeyError)

    def test_what_is_no_node(self) -> None:
        with connection() as (joining, leading):
            joining.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything\r\n\r\n")
            with pytest.raises(HandshakeError, match="not how a node begins"):
                handshake.admit(leading, KEYS)


@dataclass
class Peer:
    """A node that does what a test tells it."""

    port: int
    node: int = 1
    nodes: int = 2
    version: str = __version__
    channel: Channel[ToLeader, ToNode] = field(init=False)

    def dial(self) -> socket.socket:
        for _ in range(200):
            try:
                sock = socket.create_connection(("127.0.0.1", self.port), 5)
            except ConnectionRefusedError:
                time.sleep(0.01)
            else:
                handshake.join(sock, KEYS)
                return sock
        raise RuntimeError("nobody listens")

    def say_join(self) -> ToNode:
        """The answer to it."""
        self.channel = to_leader(self.dial())
        self.channel.send(
            Join(self.version, self.node, self.nodes, f"127.0.0.{self.node + 1}", f"node-{self.node}")
        )
        return self.hear()

    def hear(self) -> ToNode:
        """The next that is no sign of life."""
        while True:
            message, _ = self.channel.receive()
            if not isinstance(message, NodeBeat):
                return message

    def join(self, revision: str = REVISION) -> None:
        answer = self.say_join()
        assert isinstance(answer, Welcome), answer
        self.channel.send(Found("/models/here", revision))

    def attach(self, order: StartRanks) -> list[socket.socket]:
        """Control and links of each of its ranks."""
        ranks = range(order.first, order.stop)
        return [self.attach_one(Attach(order.token, r, p)) for r in ranks for p in ("control", "links")]

    def attach_one(self, attach: Attach) -> socket.socket:
        sock = self.dial()
        to_leader(sock).send(attach)
        return sock

    def lend(self) -> list[socket.socket]:
        self.join()
        order = self.hear()
        assert isinstance(order, StartRanks)
        return self.attach(order)


@dataclass
class Gathering:
    leader: Leader
    port: int
    group: Future[RemoteRanks]

    def failure(self) -> str:
        error = self.group.exception(5)
        assert isinstance(error, RankError)
        return str(error)


Gather = Callable[..., Gathering]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def gather() -> Iterator[Gather]:
    """A leader that waits for its nodes."""
    made: list[Gathering] = []
    with ThreadPoolExecutor() as pool:

        def start(
            nodes: int = 2,
            tp: int = 2,
            timeout_s: float = 5.0,
            silence_s: float = 5.0,
            host: str = "127.0.0.1",
        ) -> Gathering:
            port = free_port()
            leader = Leader(
                NodeTerms(
                    layout=Layout.of(tp, 1, nodes),
                    model="demo",
                    revision=REVISION,
                    host=host,
                    advertised=host,
                    port=port,
                    keys=KEYS,
                    timeout_s=timeout_s,
                    silence_s=silence_s,
                )
            )
            made.append(Gathering(leader, port, pool.submit(leader.gather, 1)))
            return made[-1]

        yield start
        for each in made:
            each.leader.say_end("the test is over")


class TestGathering:
    def test_ranks_in_order_with_what_their_nodes_said(self, gather: Gather) -> None:
        gathering = gather(nodes=3, tp=6)
        with ThreadPoolExecutor() as pool:
            peers = [Peer(gathering.port, node, 3) for node in (2, 1)]
            lent = [pool.submit(peer.lend) for peer in peers]
            group = gathering.group.result(5)
            assert [len(each.result()) for each in lent] == [4, 4]
        assert [(m.rank, m.host, m.model) for m in group.members] == [
            (rank, f"node-{rank // 2}", "/models/here") for rank in (2, 3, 4, 5)
        ]
        places = [RankAddress(f"127.0.0.{rank // 2 + 1}", f"node-{rank // 2}") for rank in (2, 3, 4, 5)]
        assert gathering.leader.places == places
        gathering.leader.say_serving()
        gathering.leader.say_end("")
        for peer in peers:
            assert [peer.hear(), peer.hear()] == [Serving(), End("")]

    def test_a_rank_has_the_socket_that_its_process_has(self, gather: Gather) -> None:
        gathering = gather()
        peer = Peer(gathering.port)
        with ThreadPoolExecutor() as pool:
            lent = pool.submit(peer.lend)
            [member] = gathering.group.result(5).members
            control, links = lent.result()
        control.sendall(b"c")
        links.sendall(b"l")
        assert member.channel.sock.recv(1) == b"c"
        assert member.links.recv(1) == b"l"

    @pytest.mark.parametrize(
        ("peer", "why"),
        [
            ({"version": "9.9"}, f"it is Baton 9.9, and the leader is {__version__}"),
            ({"nodes": 3}, "nodes is 3, and 2 for the leader"),
            ({"node": 2}, "it is node 2; allowed: 1 to 1"),
            ({"node": 0}, "it is node 0; allowed: 1 to 1"),
        ],
    )
    def test_who_is_refused(self, gather: Gather, peer: dict[str, object], why: str) -> None:
        gathering = gather()
        stranger = Peer(gathering.port, **peer)  # type: ignore[arg-type]
        assert stranger.say_join() == Refused(why, try_again=False)
        Peer(gathering.port).join()  # the right one still may

    def test_another_revision_is_refused_by_name(self, gather: Gather) -> None:
        gathering = gather()
        wrong = Peer(gathering.port)
        wrong.join("fedcba9876543210")
        why = f"its model demo has the revision fedcba9876543210, and the leader's has {REVISION}"
        assert wrong.hear() == Refused(why, try_again=False)
        lacking = Peer(gathering.port)
        assert isinstance(lacking.say_join(), Welcome)
        lacking.channel.send(NotFound("/models/a: no such directory"))
        assert lacking.hear() == Refused(
            "it does not have the model: /models/a: no such directory", try_again=False
        )
        assert len(Peer(gathering.port).lend()) == 2

    def test_one_that_joins_twice_may_try_again_when_the_first_is_gone(self, gather: Gather) -> None:
        gathering = gather(nodes=3, tp=3)
        first, second = Peer(gathering.port, 1, 3), Peer(gathering.port, 1, 3)
        first.join()
        assert second.say_join() == Refused("node 1 has joined already, from node-1", try_again=True)
        first.channel.close()
        for _ in range(100):
            if isinstance(second.say_join(), Welcome):
                return
            time.sleep(0.01)
        raise AssertionError("the place of a node that has gone stays taken")

    def test_one_that_does_not_come(self, gather: Gather) -> None:
        gathering = gather(nodes=4, tp=4, timeout_s=0.3)
        there = Peer(gathering.port, 2, 4)
        there.join()
        said = "of 4 nodes, 1, 3 did not join within 0.3 s (--join-timeout)"
        assert gathering.failure() == said
        assert there.hear() == End(said)

    def test_one_that_dies_before_its_ranks_are_there(self, gather: Gather) -> None:
        gathering = gather()
        peer = Peer(gathering.port)
        peer.join()
        assert isinstance(peer.hear(), StartRanks)
        peer.channel.close()
        assert gathering.failure().startswith("node 1 (node-1) is gone: ")

    def test_what_may_not_be_attached(self, gather: Gather) -> None:
        gathering = gather()
        peer = Peer(gathering.port)
        peer.join()
        order = peer.hear()
        assert isinstance(order, StartRanks)
        control = peer.attach_one(Attach(order.token, 1, "control"))
        with control:
            for wrong in (
                Attach(bytes(32), 1, "links"),
                Attach(b"short", 1, "links"),
                Attach(order.token, 0, "links"),
                Attach(order.token, 2, "links"),
                Attach(order.token, -1, "links"),
                Attach(order.token, 1, "control"),
            ):
                with peer.attach_one(wrong) as sock:
                    assert sock.recv(1) == b"", f"{wrong} is closed"
            assert not gathering.group.done()
            with peer.attach_one(Attach(order.token, 1, "links")):
                assert len(gathering.group.result(5).members) == 1

    def test_what_is_too_large_is_not_read(self, gather: Gather) -> None:
        gathering = gather()
        peer = Peer(gathering.port)
        with peer.dial() as sock:
            sock.sendall(struct.pack("!IQ", 10, 1 << 20))
            assert sock.recv(1) == b""

    def test_a_port_in_use(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            leader = Leader(
                NodeTerms(
                    layout=Layout.of(2, 1, 2),
                    model="demo",
                    revision=REVISION,
                    host="127.0.0.1",
                    advertised="127.0.0.1",
                    port=taken.getsockname()[1],
                    keys=KEYS,
                    timeout_s=1,
                )
            )
            with pytest.raises(RankError, match=r"cannot listen on 127\.0\.0\.1:\d+ for other nodes"):
                leader.gather(None)


class TestDeath:
    @pytest.fixture
    def lent(self, gather: Gather) -> tuple[Gathering, Peer]:
        gathering = gather(silence_s=0.4)
        peer = Peer(gathering.port)
        with ThreadPoolExecutor() as pool:
            sockets = pool.submit(peer.lend)
            gathering.group.result(5)
            self.sockets = sockets.result()  # or they are closed
        return gathering, peer

    def test_of_a_node(self, lent: tuple[Gathering, Peer]) -> None:
        gathering, peer = lent
        [member] = gathering.group.result().members
        peer.channel.close()
        with pytest.raises(ChannelClosedError):
            member.channel.receive()
        said = member.life.describe(1, "")
        assert said == "node 1 (node-1) is gone: the other end closed the connection"

    def test_of_a_host_that_closes_nothing(self, lent: tuple[Gathering, Peer]) -> None:
        gathering, _ = lent
        [member] = gathering.group.result().members
        began = time.monotonic()
        with pytest.raises(ChannelClosedError):
            member.channel.receive()
        assert time.monotonic() - began < 1
        assert member.life.describe(1, "") == "node 1 (node-1) has said nothing for 0.4 s"

    def test_of_a_rank(self, lent: tuple[Gathering, Peer]) -> None:
        gathering, peer = lent
        [member] = gathering.group.result().members
        peer.channel.send(Started(1, 4711))
        peer.channel.send(RankEnded(1, "was killed by SIGKILL"))
        assert member.life.describe(1, "") == "rank 1 (process 4711 on node 1 (node-1)) was killed by SIGKILL"
        assert member.life.describe(1, "no room").endswith("(node-1)) failed: no room")

    def test_that_a_node_foresees_is_passed_on(self, lent: tuple[Gathering, Peer]) -> None:
        """Whether it says so before somebody listens or after."""
        gathering, peer = lent
        heard: list[str] = []
        told = threading.Event()

        def on_leaving(node: str) -> None:
            heard.append(node)
            told.set()

        gathering.leader.call_on_leaving(on_leaving)
        peer.channel.send(Leaving())
        assert told.wait(60)
        assert heard == ["node 1 (node-1)"]


@dataclass
class Lives:
    """A node in this process, on its main thread; ranks that do nothing."""

    port: int
    health: Health
    leader: str = "127.0.0.1"

    def run(self, key: bytes = KEY, silence_s: float = 5.0, join_timeout: float = 5.0) -> int:
        config = NodeConfig(
            leader_address=self.leader,
            nodes=2,
            node_index=1,
            node_port=self.port,
            join_timeout=join_timeout,
            cluster_key=key.decode(),
            log_level="error",
        )
        return Node(config, self.health, silence_s).run()


def a_rank_here() -> psutil.Process:
    """Its process is started when its connections are there."""
    for _ in range(200):
        if found := ranks_here():
            return found[0]
        time.sleep(0.01)
    raise RuntimeError("there is no rank")


def ranks_here() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "tests.support.idle_rank" in each.cmdline()]


class TestNode:
    @pytest.fixture
    def port(
        self, gather: Gather, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[int]:
        """A leader that waits for the real demo model's node."""
        monkeypatch.setattr(processes, "PROGRAM", "tests.support.idle_rank")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.setattr(__name__ + ".REVISION", hub.revision_of(hub.resolve_model("demo")))
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.host = getattr(request, "param", "127.0.0.1")
        self.gathering = gather(host=self.host)
        yield self.gathering.port
        for number, handler in before.items():
            signal.signal(number, handler)

    def then(self, *steps: Callable[[], None]) -> threading.Thread:
        """When the ranks are there."""

        def run() -> None:
            self.gathering.group.result(5)
            for step in steps:
                step()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def stop_ranks(self) -> None:
        for member in self.gathering.group.result().members:
            member.channel.close()

    @pytest.mark.parametrize("port", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)], indirect=True)
    def test_it_ends_in_order_with_its_leader(self, port: int) -> None:
        with Health.serving(self.host, 0) as health:
            seen: list[int] = []
            where = join_address(self.host, health.port or 0)

            def ask(path: str) -> None:
                try:
                    with urllib.request.urlopen(f"http://{where}{path}") as answer:
                        seen.append(answer.status)
                except urllib.error.HTTPError as error:
                    seen.append(error.code)

            def serve() -> None:
                self.gathering.leader.say_serving()
                until = time.monotonic() + 60
                while not health.ready and time.monotonic() < until:
                    time.sleep(0.01)

            steps = (lambda: ask("/readyz"), serve, lambda: ask("/readyz"), lambda: ask("/livez"))
            thread = self.then(*steps, self.stop_ranks, lambda: self.gathering.leader.say_end(""))
            assert Lives(port, health, self.host).run() == 0
            thread.join()
        assert seen == [503, 200, 200]
        assert not ranks_here()

    def test_it_ends_with_a_worker_that_cannot_go_on(self, port: int) -> None:
        thread = self.then(lambda: self.gathering.leader.say_end("rank 0 is dead"))
        assert Lives(port, Health()).run() == EXIT_CRASHED
        thread.join()
        assert not ranks_here(), "they were killed"

    def test_it_ends_with_a_leader_that_closes_nothing(
        self, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        thread = self.then(self.gathering.leader._over.set)  # no sign of life from here on
        began = time.monotonic()
        assert Lives(port, Health()).run(silence_s=1.2) == EXIT_CRASHED
        assert time.monotonic() - began < 4
        thread.join()
        assert not ranks_here()

    def test_told_to_end_it_waits_for_the_leader(self, port: int) -> None:
        left = threading.Event()
        health = Health()
        self.gathering.leader.call_on_leaving(lambda node: left.set())

        def stop() -> None:
            self.gathering.leader.say_serving()
            until = time.monotonic() + 5
            while not health.ready and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert left.wait(60)
            assert a_rank_here().is_running(), "the leader may drain first"
            self.stop_ranks()
            self.gathering.leader.say_end("")

        thread = self.then(stop)
        assert Lives(port, health).run() == 0
        thread.join()
        assert left.is_set()

    def test_a_rank_that_dies_is_told_of(self, port: int) -> None:
        said: list[str] = []

        def kill() -> None:
            [member] = self.gathering.group.result().members
            a_rank_here().kill()
            with pytest.raises(ChannelClosedError):
                member.channel.receive()
            said.append(member.life.describe(1, ""))
            self.gathering.leader.say_end(said[0])

        thread = self.then(kill)
        assert Lives(port, Health()).run() == EXIT_CRASHED
        thread.join()
        assert said[0].startswith("rank 1 (process ")
        assert said[0].endswith(" on node 1 (127.0.0.1)) was killed by SIGKILL")

    def test_of_another_key_it_says_so(self, port: int) -> None:
        with pytest.raises(StartError, match=r"the leader at 127\.0\.0\.1:\d+ is not ours: it has an"):
            Lives(port, Health()).run(b"another")

    def test_a_leader_that_is_never_there(self) -> None:
        with pytest.raises(StartError, match=r"did not join 127\.0\.0\.1:\d+ within 1 s \(--join-timeout\)"):
            Lives(free_port(), Health()).run(join_timeout=1)
