"""The messages between the nodes of a worker, after the handshake. None has a payload."""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from baton.parallel.channel import Channel

BEAT_S = 1.0
"""The interval between two heartbeats, each way, in seconds."""
SILENCE_S = 15.0
"""The silence after which a node is dead, in seconds: a host that vanishes closes no connection."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message of a node's session."""

    version: str
    """The node's version of Baton."""
    node: int
    nodes: int
    host: str
    """The address on which the node's ranks listen."""
    advertised: str
    """The address at which others reach the node's ranks."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The only message on a connection that becomes a rank's."""

    token: bytes
    """The token of ``StartRanks``."""
    rank: int
    purpose: Literal["control", "links"]


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The model is on the node."""

    directory: str
    revision: str


class NotFound(msgspec.Struct, frozen=True, tag="not_found"):
    """The model is not on the node; the node ends."""

    why: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A rank's process has started."""

    rank: int
    pid: int


class RankEnded(msgspec.Struct, frozen=True, tag="rank_ended"):
    rank: int
    how: str
    """The end of the rank's process in words, as in "was killed by SIGKILL"."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node was told to end. It waits until the leader has ended."""


class NodeBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to ``Join``: find this model. The node answers with ``Found`` or ``NotFound``."""

    model: str
    """The model as the leader's option names it."""
    log_level: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The leader refuses the node."""

    why: str
    try_again: bool
    """Whether the node may be admitted soon."""


class StartRanks(msgspec.Struct, frozen=True, tag="start"):
    """All nodes have joined: start these ranks, each with two connections of its own."""

    first: int
    stop: int
    token: bytes
    num_threads: int | None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The worker is ready."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last message of the leader."""

    why: str
    """The reason of the end; empty after an orderly end."""


ToLeader = Join | Attach | Found | NotFound | Started | RankEnded | Leaving | NodeBeat
ToNode = Welcome | Refused | StartRanks | Serving | End | NodeBeat


def to_node(sock: socket.socket) -> Channel[ToNode, ToLeader]:
    """Return the leader's end of a channel to a node."""
    return Channel(sock, ToLeader, max_payload=0)


def to_leader(sock: socket.socket) -> Channel[ToLeader, ToNode]:
    """Return a node's end of the channel to the leader."""
    return Channel(sock, ToNode, max_payload=0)


def prepare(sock: socket.socket) -> None:
    """Set up either end of a connection between nodes: for small messages that the other side waits for, and
    to notice a host that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
