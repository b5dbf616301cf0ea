"""The leader's side: nodes join the leader, which starts ranks on them, and all end together.

The listener is open until all nodes have joined. Each connection is greeted on a thread of its own, of which
there is a limited number: it becomes a node's session, or one of a rank's two connections, or is closed.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton import __version__
from baton.greeting.cluster_key import ClusterKeys
from baton.net import sockets
from baton.nodes.handshake import HANDSHAKE_S, HandshakeError, admit
from baton.nodes.messages import (
    BEAT_S,
    SILENCE_S,
    Attach,
    End,
    Found,
    Join,
    NodeBeat,
    Refused,
    Serving,
    StartRanks,
    ToLeader,
    ToNode,
    Welcome,
    prepare,
    to_node,
)
from baton.nodes.session import NodeLife, Session
from baton.parallel.channel import Channel, ChannelClosedError, to_ranks
from baton.parallel.layout import Layout
from baton.parallel.ranks import Member, RankError, RemoteRanks
from baton.process.options import join_address
from baton.transport.ranks.endpoint import RankAddress

log = logging.getLogger(__name__)

MAX_GREETINGS = 64
ATTACH_S = 60.0
"""The time until the connections of all ranks are there, in seconds. A node starts a rank's process after
that rank's connections."""
_LOOK_S = 0.2
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTerms:
    """The terms that the nodes of a worker must have in common, and the address where they join."""

    layout: Layout
    model: str
    """The model as the leader's option names it."""
    revision: str
    """The revision of the model that the leader found."""
    host: str
    advertised: str
    port: int
    keys: ClusterKeys = field(repr=False)
    timeout_s: float
    """The time until all nodes have joined, in seconds."""
    log_level: str = "info"
    silence_s: float = SILENCE_S


class Leader:
    """The ``Cluster`` of a worker on several nodes."""

    def __init__(self, wanted: NodeTerms) -> None:
        self._wanted = wanted
        self._changed = threading.Condition()
        self._sessions: dict[int, Session] = {}
        self._tokens: dict[int, bytes] = {}
        """Tokens that admit the connections of a node's ranks, by node. No node joins once there are any."""
        self._attached: dict[tuple[int, str], socket.socket] = {}
        self._greetings = threading.BoundedSemaphore(MAX_GREETINGS)
        self._over = threading.Event()
        self._on_leaving: Callable[[str], None] | None = None

    @property
    def count(self) -> int:
        return self._wanted.layout.nodes

    @property
    def places(self) -> Sequence[RankAddress]:
        per_node = self._wanted.layout.per_node
        return [
            RankAddress(each.joined.host, each.joined.advertised)
            for _, each in sorted(self._sessions.items())
            for _ in range(per_node)
        ]

    # --- until all nodes have joined

    def gather(self, num_threads: int | None) -> RemoteRanks:
        """Wait for the nodes, and start their ranks. Raises RankError if a node does not come in time, or is
        lost before its ranks are connected."""
        wanted = self._wanted
        try:
            listener = sockets.listen(wanted.host, wanted.port, backlog=MAX_GREETINGS)
        except OSError as error:
            at = join_address(wanted.host, wanted.port)
            raise RankError(f"cannot listen on {at} for other nodes: {error}") from error
        log.info("waiting for %d other nodes at %s", self.count - 1, join_address(wanted.host, wanted.port))
        gathered = threading.Event()
        threading.Thread(target=self._accept, args=(listener, gathered), name="nodes", daemon=True).start()
        threading.Thread(target=self._beat, name="nodes-beat", daemon=True).start()
        try:
            self._wait_for_nodes()
            members = self._start_ranks(num_threads)
        except BaseException as error:
            self.say_end(str(error) or type(error).__name__)
            raise
        finally:
            gathered.set()
        return RemoteRanks(members, wanted.advertised, self.say_end)

    def _wait_for_nodes(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._all_found() or self._over.is_set(), self._wanted.timeout_s)
            if self._over.is_set():
                raise RankError("the worker has ended before all nodes were there")
            if not self._all_found():
                missing = [str(node) for node in range(1, self.count) if not self._has_found(node)]
                raise RankError(
                    f"of {self.count} nodes, {', '.join(missing)} did not join within "
                    f"{self._wanted.timeout_s:g} s (--join-timeout)"
                )
            self._tokens = {node: secrets.token_bytes(_TOKEN_BYTES) for node in self._sessions}

    def _all_found(self) -> bool:
        return all(self._has_found(node) for node in range(1, self.count))

    def _has_found(self, node: int) -> bool:
        found = self._sessions[node].found if node in self._sessions else None
        return found is not None and found.revision == self._wanted.revision

    def _start_ranks(self, num_threads: int | None) -> list[Member]:
        layout = self._wanted.layout
        for node, session in self._sessions.items():
            ranks = layout.ranks_of(node)
            session.tell(StartRanks(ranks.start, ranks.stop, self._tokens[node], num_threads))
        expected = 2 * layout.per_node * (self.count - 1)
        with self._changed:
            self._changed.wait_for(lambda: self._lost() or len(self._attached) == expected, ATTACH_S)
            if lost := self._lost():
                raise RankError(lost)
            if len(self._attached) < expected:
                raise RankError(f"the ranks of other nodes did not all call within {ATTACH_S:g} s")
            return [
                self._member(session, rank)
                for node, session in sorted(self._sessions.items())
                for rank in layout.ranks_of(node)
            ]

    def _lost(self) -> str:
        return next((session.dead for session in self._sessions.values() if session.dead), "")

    def _member(self, session: Session, rank: int) -> Member:
        control, links = self._attached[rank, "control"], self._attached[rank, "links"]
        session.controls.append(control)
        assert session.found is not None
        host, model = session.joined.advertised, session.found.directory
        return Member(rank, NodeLife(session), to_ranks(control), links, host, model)

    # --- incoming connections

    def _accept(self, listener: socket.socket, gathered: threading.Event) -> None:
        listener.settimeout(_LOOK_S)
        with listener:
            while not gathered.is_set():
                try:
                    sock, (peer, *_) = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # out of file descriptors, or the peer has gone
                    log.warning("could not accept a node's connection: %s", error)
                    time.sleep(_LOOK_S)
                    continue
                if not self._greetings.acquire(blocking=False):
                    sock.close()
                    continue
                threading.Thread(target=self._greet, args=(sock, peer), name="node", daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        session = None
        try:
            sock.settimeout(HANDSHAKE_S)
            prepare(sock)
            admit(sock, self._wanted.keys)
            channel = to_node(sock)
            first, _ = channel.receive()
            if isinstance(first, Attach):
                self._attach(first, sock)
            elif isinstance(first, Join):
                session = self._join(first, channel)
            else:
                raise HandshakeError(f"it begins with {first}")
        except (HandshakeError, ChannelClosedError, OSError) as error:
            log.warning("a node at %s did not join: %s", peer, error)
            sock.close()
        finally:
            self._greetings.release()
        if session is not None:
            self._listen_to(session)

    def _join(self, joined: Join, channel: Channel[ToNode, ToLeader]) -> Session:
        session = Session(joined, channel, self._changed)
        with self._changed:
            why, try_again = self._objection(joined)
            if not why:  # a node hears nothing before its welcome
                channel.send(Welcome(self._wanted.model, self._wanted.log_level))
                channel.sock.settimeout(self._wanted.silence_s)
                self._sessions[joined.node] = session
        if why:
            channel.send(Refused(why, try_again))
            raise HandshakeError(f"it is refused: {why}")
        log.info("%s joined", session.name)
        return session

    def _objection(self, joined: Join) -> tuple[str, bool]:
        """Return why a node may not join, and whether it may try again."""
        if joined.version != __version__:
            return f"it is Baton {joined.version}, and the leader is {__version__}", False
        if joined.nodes != self.count:
            return f"nodes is {joined.nodes}, and {self.count} for the leader", False
        if not 1 <= joined.node < self.count:
            return f"it is node {joined.node}; allowed: 1 to {self.count - 1}", False
        before = self._sessions.get(joined.node)
        if before is not None:
            return f"node {joined.node} has joined already, from {before.joined.advertised}", True
        return "", False

    def _attach(self, attach: Attach, sock: socket.socket) -> None:
        with self._changed:
            node = attach.rank // self._wanted.layout.per_node
            token = self._tokens.get(node, b"")
            if not token or not hmac.compare_digest(token, attach.token):
                raise HandshakeError(f"it may not attach rank {attach.rank}")
            if (attach.rank, attach.purpose) in self._attached:
                raise HandshakeError(f"rank {attach.rank} is attached already")
            sock.settimeout(None)
            self._attached[attach.rank, attach.purpose] = sock
            self._changed.notify_all()

    # --- while the nodes live

    def _listen_to(self, session: Session) -> None:
        while not session.dead:
            session.hear()
            if self._gathering_without(session):
                log.warning("%s", session.dead)
                session.channel.close()
            self._pass_on_leaving(session)

    def _pass_on_leaving(self, session: Session) -> None:
        with self._changed:
            on_leaving = self._on_leaving
            if on_leaving is None or not session.leaving:
                return
            session.leaving = False  # say it once
        on_leaving(session.name)

    def _gathering_without(self, session: Session) -> bool:
        """Whether nodes are still gathered and this one is out: another one may join in its place."""
        with self._changed:
            if self._tokens:
                return False
            if why := self._unfit(session):
                session.tell(Refused(why, try_again=False))
                session.dead = f"{session.name} is refused: {why}"
            if session.dead:
                self._sessions.pop(session.joined.node)
            return bool(session.dead)

    def _unfit(self, session: Session) -> str:
        """Return why a node that has looked for the model cannot take part; empty if it can."""
        if session.not_found:
            return f"it does not have the model: {session.not_found}"
        match session.found:
            case Found(revision=revision) if revision != self._wanted.revision:
                return (
                    f"its model {self._wanted.model} has the revision {revision}, "
                    f"and the leader's has {self._wanted.revision}"
                )
        return ""

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._changed:
                sessions = list(self._sessions.values())
            for session in sessions:
                session.tell(NodeBeat())

    def call_on_leaving(self, on_leaving: Callable[[str], None]) -> None:
        with self._changed:
            self._on_leaving = on_leaving
        for session in self._sessions.values():
            self._pass_on_leaving(session)

    def say_serving(self) -> None:
        for session in self._sessions.values():
            session.tell(Serving())

    def say_end(self, why: str) -> None:
        """Tell the nodes that the worker ends, with the reason; nothing is sent to them after it."""
        with self._changed:
            said, sessions = self._over.is_set(), list(self._sessions.values())
            self._over.set()
            self._changed.notify_all()
        if not said:
            for session in sessions:
                session.tell(End(why))
