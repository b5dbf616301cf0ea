"""The processes of the ranks 1, 2, ... as their leader sees them: their start, their answers, their end."""

from __future__ import annotations

import itertools
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from baton.parallel.channel import Channel, ChannelClosedError, to_ranks
from baton.parallel.layout import LOOPBACK
from baton.parallel.messages import RankFailed, ServeLinks, StopRank, ToLeader, ToRank
from baton.parallel.processes import END_S, end_process_within, how_it_ended, start_process

GATHER_S = 0.1
"""The time to wait for the first death, in seconds: when one rank dies, others fail because of it."""
CAUSE_S = 1.5
"""The time to wait, when a collective fails, for the news of which rank died, in seconds."""
ENDED = "the ranks of this model were ended"


class RankError(RuntimeError):
    """A rank is dead: which, its process, and how it ended."""


class Life(Protocol):
    """A rank's process, on whatever node."""

    def describe(self, rank: int, why: str) -> str:
        """Describes the end of a rank whose connection is gone. ``why``: the rank's last message."""

    def end(self, seconds: float) -> None:
        """Ends the process, which was told to stop, within ``seconds``. Returns when it is gone, or left to
        its node."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank with its process and the sockets to it."""

    rank: int
    life: Life
    channel: Channel[ToRank, ToLeader]
    links: socket.socket
    """The socket for the service that ``ServeLinks`` begins."""
    host: str
    """The address at which other ranks reach the rank."""
    model: str
    """The model's directory on the rank's node; empty: the same as on the leader's node."""


@dataclass(frozen=True, slots=True)
class RemoteRanks:
    """The ranks of other nodes."""

    members: Sequence[Member] = ()
    host: str = LOOPBACK
    """The address at which remote ranks reach the ranks of this node."""
    say_end: Callable[[str], None] = lambda why: None
    """Tells the other nodes that the model ends, and why; an empty text if in order."""


class Nodes(Protocol):
    """The nodes that a model's ranks are on."""

    @property
    def count(self) -> int:
        """The number of nodes, this one included."""

    def gather(self, num_threads: int | None) -> RemoteRanks:
        """Has the ranks of the other nodes started, with ``num_threads`` threads each, when all nodes are
        there. May raise RankError."""


@dataclass(frozen=True, slots=True)
class OneNode:
    """A single node, this one."""

    count: int = 1

    def gather(self, num_threads: int | None) -> RemoteRanks:
        return RemoteRanks()


ONE_NODE = OneNode()


@dataclass(frozen=True, slots=True)
class _LocalLife:
    process: subprocess.Popen[bytes]

    def describe(self, rank: int, why: str) -> str:
        name = f"rank {rank} (process {self.process.pid})"
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"{name} closed its connection"
        return f"{name} failed: {why}" if why and status >= 0 else f"{name} {how_it_ended(status)}"

    def end(self, seconds: float) -> None:
        end_process_within(self.process, seconds)


@dataclass(slots=True)
class _Heard:
    """A rank, and what is known of its end."""

    member: Member
    ended: bool = False
    why: str = ""
    """The reason in the rank's last message."""


@dataclass(slots=True)
class _Shared:
    """The state that the watching thread and the callers share. It does not refer to ``Ranks``, so that ranks
    end when nothing refers to them any more."""

    ranks: Sequence[_Heard]
    say_end: Callable[[str], None]
    changed: threading.Condition = field(default_factory=threading.Condition)
    replies: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, question) -> answer."""
    dead: str | None = None
    closing: bool = False
    closed_for: str = ""
    """Why the ranks were closed, if not in order."""
    on_death: Callable[[str], None] | None = None

    def tell(self, dead: str) -> None:
        """Announces a death to all waiting threads. Under ``changed``."""
        self.dead = dead
        self.changed.notify_all()


class Ranks:
    """Ranks 1 and on, each a process of its own that ends with this one.

    One thread reads their messages. When a rank dies, that thread calls the function given to
    :meth:`call_on_death`, and then every thread that waits for an answer gets a RankError.
    """

    def __init__(self, local: Iterable[int], num_threads: int | None, group: RemoteRanks) -> None:
        """Starts the ranks ``local`` on this node, with ``num_threads`` threads each; ``group`` is started
        already."""
        ranks: list[_Heard] = []
        self._shared = _Shared(ranks, group.say_end)
        self._local: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count(1)
        self._finalizer = weakref.finalize(self, _end, self._shared)
        for rank in local:
            ranks.append(_Heard(self._start(rank, num_threads, group.host)))
        ranks += [_Heard(member) for member in group.members]
        threading.Thread(target=_watch, args=(self._shared,), name="ranks", daemon=True).start()

    def _start(self, rank: int, num_threads: int | None, host: str) -> Member:
        ours, theirs = socket.socketpair()
        links, their_links = socket.socketpair()
        process = start_process(theirs, their_links, num_threads)
        self._local.append(process)
        return Member(rank, _LocalLife(process), to_ranks(ours), links, host, "")

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks on this node."""
        return [process.pid for process in self._local]

    def call_on_death(self, on_death: Callable[[str], None]) -> None:
        """Makes ``on_death`` the only listener for which rank died and how; called at once if one is dead
        already. It must not refer to these ranks."""
        with self._shared.changed:
            self._shared.on_death = on_death
            dead = self._shared.dead
        if dead is not None:
            on_death(dead)

    def tell(self, message: ToRank, payload: bytes | memoryview = b"") -> None:
        """Sends a message to all ranks. RankError if one is dead."""
        for each in self._shared.ranks:
            self._send(each.member, message, payload)

    def question(self) -> int:
        """A number to put into messages that are answered."""
        return next(self._numbers)

    def ask(self, question: int, message: ToRank) -> list[int]:
        """Sends a message to all ranks and waits for their answers, by rank. RankError if one is dead."""
        self.tell(message)
        return self.answers(question)

    def ask_each(self, make: Callable[[Member], ToRank]) -> None:
        """Sends each rank a message of its own. The caller waits for their answers with :meth:`answers`."""
        for each in self._shared.ranks:
            self._send(each.member, make(each.member), b"")

    def answers(self, question: int) -> list[int]:
        """The answer of each rank to a question. RankError if a rank is dead."""
        shared = self._shared
        keys = [(each.member.rank, question) for each in shared.ranks]
        with shared.changed:
            shared.changed.wait_for(
                lambda: shared.dead is not None or all(key in shared.replies for key in keys)
            )
            if all(key in shared.replies for key in keys):
                return [shared.replies.pop(key) for key in keys]
            raise RankError(str(shared.dead))

    def cause(self, error: Exception) -> Exception:
        """The cause of an error in a step: the death of a rank, if there was one, or the error itself."""
        shared = self._shared
        with shared.changed:
            if not isinstance(error, RankError) and not shared.closing:
                shared.changed.wait_for(lambda: shared.dead is not None, CAUSE_S)
            return error if shared.dead is None else RankError(shared.dead)

    def serve_links(self) -> list[socket.socket]:
        """Has the ranks serve their pools to connectors. Returns the socket to each, which is the caller's
        from here on. Once. RankError if a rank is dead."""
        question = self.question()
        self.ask(question, ServeLinks(question))
        return [each.member.links for each in self._shared.ranks]

    def close(self, why: str = "") -> None:
        """Ends the ranks, and returns when the ranks of this node are gone. ``why``: the reason for other
        nodes, if it is not in order."""
        self._shared.closed_for = why
        self._finalizer()

    def _send(self, to: Member, message: ToRank, payload: bytes | memoryview) -> None:
        if self._shared.closing:
            raise RankError(self._shared.dead or ENDED)
        try:
            to.channel.send(message, payload)
        except OSError as error:
            raise self.cause(error) from error


def _watch(shared: _Shared) -> None:
    """Reads the ranks' messages until a rank is gone, and announces that."""
    with selectors.DefaultSelector() as selector:
        for each in shared.ranks:
            selector.register(each.member.channel.sock, selectors.EVENT_READ, each)
        while not any(each.ended for each in shared.ranks):
            for key, _ in selector.select():
                _hear(shared, key.data)
        # The first rank that died may be heard of last.
        until = time.monotonic() + GATHER_S
        while (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                _hear(shared, key.data)
                if key.data.ended:
                    selector.unregister(key.fileobj)
    if not shared.closing:
        _tell_death(shared)
    else:
        with shared.changed:
            shared.tell(ENDED)


def _hear(shared: _Shared, each: _Heard) -> None:
    try:
        message, _ = each.member.channel.receive()
    except ChannelClosedError:
        each.ended = True
        return
    if isinstance(message, RankFailed):
        each.why = message.why
    else:
        with shared.changed:
            shared.replies[each.member.rank, message.to] = message.value
            shared.changed.notify_all()


def _tell_death(shared: _Shared) -> None:
    dead = [each for each in shared.ranks if each.ended]
    # A rank that was killed sent nothing; messages of other ranks are about its absence then.
    first = min(dead, key=lambda each: bool(each.why))
    what = first.member.life.describe(first.member.rank, first.why)
    shared.say_end(what)
    with shared.changed:
        on_death = shared.on_death
        if on_death is None:
            shared.tell(what)
    if on_death is not None:
        on_death(what)
        with shared.changed:
            shared.tell(what)


def _end(shared: _Shared) -> None:
    """Tells all ranks to stop, and kills those that do not."""
    shared.closing = True
    for each in shared.ranks:
        with suppress(OSError):
            each.member.channel.send(StopRank())
    shared.say_end(shared.closed_for)
    until = time.monotonic() + END_S
    for each in shared.ranks:
        each.member.life.end(until - time.monotonic())
        each.member.channel.close()
        each.member.links.close()
