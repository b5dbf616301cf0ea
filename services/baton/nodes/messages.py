"""What the nodes of a worker say to each other, behind the handshake. None has a payload."""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from baton.parallel.channel import Channel

BEAT_S = 1.0
"""Between two signs of life, each way."""
SILENCE_S = 15.0
"""A node that says nothing for so long is dead: a host that vanishes closes no connection."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first word of a node's session."""

    version: str
    """Of Baton."""
    node: int
    nodes: int
    host: str
    """What its ranks listen on."""
    advertised: str
    """What others call to reach them."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first and last word on a connection that becomes a rank's."""

    token: bytes
    """What ``StartRanks`` said."""
    rank: int
    purpose: Literal["control", "links"]


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The model is here."""

    directory: str
    revision: str


class NotFound(msgspec.Struct, frozen=True, tag="not_found"):
    """It is not; the node ends."""

    why: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A rank's process."""

    rank: int
    pid: int


class RankEnded(msgspec.Struct, frozen=True, tag="rank_ended"):
    rank: int
    how: str
    """Of its process, as in "was killed by SIGKILL"."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node was told to end. It waits until the leader has."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to ``Join``: have this model ready. Answered with ``Found`` or ``NotFound``."""

    model: str
    """As the leader's option has it."""
    log_level: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The leader will have nothing to do with the node."""

    why: str
    try_again: bool
    """Whether it may be another matter soon."""


class StartRanks(msgspec.Struct, frozen=True, tag="start"):
    """All nodes are there: start these, each with two connections of its own."""

    first: int
    stop: int
    token: bytes
    num_threads: int | None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The worker is ready."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The leader's last word."""

    why: str
    """Empty: in order."""


ToLeader = Join | Attach | Found | NotFound | Started | RankEnded | Leaving | Beat
ToNode = Welcome | Refused | StartRanks | Serving | End | Beat


def to_node(sock: socket.socket) -> Channel[ToNode, ToLeader]:
    """The leader's end."""
    return Channel(sock, ToLeader, most_payload=0)


def to_leader(sock: socket.socket) -> Channel[ToLeader, ToNode]:
    """Another node's end."""
    return Channel(sock, ToNode, most_payload=0)


def prepare(sock: socket.socket) -> None:
    """For small messages that others wait for, and to find a host that has vanished: both ends of each
    connection between nodes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
