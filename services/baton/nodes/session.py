"""Another node of a worker, as the leader knows it: its address, what it reported, and whether it lives."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from baton.nodes.messages import (
    SILENCE_S,
    Found,
    Join,
    Leaving,
    NodeBeat,
    NotFound,
    RankEnded,
    Started,
    ToLeader,
    ToNode,
)
from baton.parallel.channel import Channel, ChannelClosedError, SilentError
from baton.parallel.processes import END_S


@dataclass(slots=True)
class Session:
    """The state of one node. It is written under ``changed``, which all sessions of a worker share."""

    joined: Join
    channel: Channel[ToNode, ToLeader]
    changed: threading.Condition
    found: Found | None = None
    not_found: str = ""
    leaving: bool = False
    dead: str = ""
    """What happened to the node, in words; empty while it lives."""
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    """How the processes of the ranks ended, by rank."""
    controls: list[socket.socket] = field(default_factory=list)
    """The control connections of the node's ranks. They are shut down with the node, so that nothing waits
    for a dead rank."""

    @property
    def name(self) -> str:
        return f"node {self.joined.node} ({self.joined.advertised})"

    def tell(self, message: ToNode) -> None:
        """Send ``message`` if possible. A failure shows when the node's connection ends."""
        with suppress(OSError):
            self.channel.send(message)

    def hear(self) -> None:
        """Take the next message, or mark the node as dead when its connection has ended."""
        try:
            message, _ = self.channel.receive()
        except SilentError:
            self._die(f"{self.name} has said nothing for {self.channel.sock.gettimeout() or SILENCE_S:g} s")
            return
        except ChannelClosedError as error:
            self._die(f"{self.name} is gone: {error}")
            return
        with self.changed:
            match message:
                case Found():
                    self.found = message
                case NotFound(why=why):
                    self.not_found = why
                case Started(rank=rank, pid=pid):
                    self.pids[rank] = pid
                case RankEnded(rank=rank, how=how):
                    self.ended[rank] = how
                case Leaving():
                    self.leaving = True
                case NodeBeat():
                    return
                case _:
                    self.dead = f"{self.name} says what is not to be said now: {message}"
            self.changed.notify_all()

    def _die(self, how: str) -> None:
        with self.changed:
            self.dead = how
            for control in self.controls:
                with suppress(OSError):  # already closed
                    control.shutdown(socket.SHUT_RDWR)
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class NodeLife:
    """The life of a rank on another node, as that node reports it."""

    session: Session

    def describe(self, rank: int, why: str) -> str:
        session = self.session
        with session.changed:
            session.changed.wait_for(lambda: session.dead or rank in session.ended, END_S)
            if session.dead:
                return session.dead
            pid, how = session.pids.get(rank, 0), session.ended.get(rank, "closed its connection")
        name = f"rank {rank} (process {pid} on {session.name})"
        return f"{name} failed: {why}" if why else f"{name} {how}"

    def end(self, seconds: float) -> None:
        """Do nothing: the node ends the rank, and outlives it."""
