"""The processes of the ranks 1, 2, ... as their leader sees them: their start, their answers, their end."""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.parallel.channel import Channel, ChannelClosedError, to_ranks
from baton.parallel.messages import Failed, ServeLinks, Stop, ToLeader, ToRank

PROGRAM = "baton.rank"
END_S = 1.0
"""How long a rank may take to end that is told to; and one whose connection is gone."""
GATHER_S = 0.1
"""When one rank dies, others fail for want of it: how long to wait for the one that was first."""
CAUSE_S = 1.5
"""How long to wait, when a collective fails, for the news of who died."""
ENDED = "the ranks of this model were ended"


class RankError(RuntimeError):
    """A rank is dead: which, its process, and how it ended."""


@dataclass(slots=True)
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel[ToRank, ToLeader]
    links: socket.socket
    """For what ``ServeLinks`` begins."""
    ended: bool = False
    why: str = ""
    """What it said at last."""

    def describe(self) -> str:
        """How it ended."""
        name = f"rank {self.rank} (process {self.process.pid})"
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"{name} closed its connection"
        if status < 0:
            with suppress(ValueError):
                return f"{name} was killed by {signal.Signals(-status).name}"
            return f"{name} was killed by signal {-status}"
        return f"{name} failed: {self.why}" if self.why else f"{name} ended with exit status {status}"


@dataclass(slots=True)
class _Shared:
    """What the watching thread and the others share. It does not refer to ``Ranks``, so that ranks that
    nobody holds any more end."""

    processes: Sequence[_Process]
    changed: threading.Condition = field(default_factory=threading.Condition)
    replies: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, question) -> answer."""
    dead: str | None = None
    closing: bool = False
    on_death: Callable[[str], None] | None = None

    def tell(self, dead: str) -> None:
        """Somebody is dead, for all who wait. Under ``changed``."""
        self.dead = dead
        self.changed.notify_all()


class Ranks:
    """Ranks 1 to ``world - 1``, each a process of its own that ends with this one.

    One thread reads what they say. When one dies, what was given to :meth:`call_on_death` is called on it,
    and then everybody who waits for an answer gets a RankError.
    """

    def __init__(self, world: int, num_threads: int | None) -> None:
        """Starts them. ``num_threads``: of each, on the CPU; thread pools are sized when a library is
        loaded."""
        environment = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        processes: list[_Process] = []
        self._shared = _Shared(processes)
        self._numbers = itertools.count(1)
        self._finalizer = weakref.finalize(self, _end, self._shared)
        for rank in range(1, world):
            processes.append(_start(rank, environment))
        threading.Thread(target=_watch, args=(self._shared,), name="ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._shared.processes]

    def call_on_death(self, on_death: Callable[[str], None]) -> None:
        """From now on, ``on_death`` and nobody else hears which rank died and how; at once if one is dead
        already. It must not refer to these ranks."""
        with self._shared.changed:
            self._shared.on_death = on_death
            dead = self._shared.dead
        if dead is not None:
            on_death(dead)

    def tell(self, message: ToRank, payload: bytes | memoryview = b"") -> None:
        """Sends to all. RankError if one is dead."""
        for each in self._shared.processes:
            self._send(each, message, payload)

    def question(self) -> int:
        """A number to put into messages that are answered."""
        return next(self._numbers)

    def ask(self, question: int, message: ToRank) -> list[int]:
        """Sends to all and waits for their answers, by rank. RankError if one is dead."""
        self.tell(message)
        return self.answers(question)

    def ask_each(self, question: int, make: Callable[[int], ToRank]) -> None:
        """Sends each rank a message of its own. Their answers are to be waited for."""
        for each in self._shared.processes:
            self._send(each, make(each.rank), b"")

    def answers(self, question: int) -> list[int]:
        """The answer of each to what was asked. RankError if one is dead."""
        shared = self._shared
        keys = [(each.rank, question) for each in shared.processes]
        with shared.changed:
            shared.changed.wait_for(
                lambda: shared.dead is not None or all(key in shared.replies for key in keys)
            )
            if all(key in shared.replies for key in keys):
                return [shared.replies.pop(key) for key in keys]
            raise RankError(str(shared.dead))

    def cause(self, error: Exception) -> Exception:
        """What is behind an error in a step: the death of a rank, if there was one, or the error itself."""
        shared = self._shared
        with shared.changed:
            if not isinstance(error, RankError) and not shared.closing:
                shared.changed.wait_for(lambda: shared.dead is not None, CAUSE_S)
            return error if shared.dead is None else RankError(shared.dead)

    def serve_links(self) -> list[socket.socket]:
        """Has them serve their pools to connectors; the socket to each, which is the caller's from here on.
        Once. RankError if one is dead."""
        question = self.question()
        self.ask(question, ServeLinks(question))
        return [each.links for each in self._shared.processes]

    def close(self) -> None:
        """Ends them, and returns when they are gone."""
        self._finalizer()

    def _send(self, to: _Process, message: ToRank, payload: bytes | memoryview) -> None:
        if self._shared.closing:
            raise RankError(self._shared.dead or ENDED)
        try:
            to.channel.send(message, payload)
        except OSError as error:
            raise self.cause(error) from error


def _start(rank: int, environment: dict[str, str]) -> _Process:
    ours, theirs = socket.socketpair()
    links, their_links = socket.socketpair()
    with theirs, their_links:
        # -P: a directory called torch in the working directory must not become our torch. The session of its
        # own keeps the terminal's Ctrl-C from it: the leader drains first. What it prints must not get into
        # standard output, which is the leader's.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *_descriptors(theirs, their_links)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **environment},
            pass_fds=[theirs.fileno(), their_links.fileno()],
            start_new_session=True,
        )
    return _Process(rank, process, to_ranks(ours), links)


def _descriptors(control: socket.socket, links: socket.socket) -> tuple[str, ...]:
    return ("--control", str(control.fileno()), "--links", str(links.fileno()))


def _watch(shared: _Shared) -> None:
    """Reads what ranks say until one is gone, and tells that."""
    with selectors.DefaultSelector() as selector:
        for each in shared.processes:
            selector.register(each.channel.sock, selectors.EVENT_READ, each)
        while not any(each.ended for each in shared.processes):
            for key, _ in selector.select():
                _hear(shared, key.data)
        # The one that was first may be heard of last.
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


def _hear(shared: _Shared, each: _Process) -> None:
    try:
        message, _ = each.channel.receive()
    except ChannelClosedError:
        each.ended = True
        return
    if isinstance(message, Failed):
        each.why = message.why
    else:
        with shared.changed:
            shared.replies[each.rank, message.to] = message.value
            shared.changed.notify_all()


def _tell_death(shared: _Shared) -> None:
    dead = [each for each in shared.processes if each.ended]
    # One that was killed said nothing; what others say then is about its absence.
    first = min(dead, key=lambda each: bool(each.why))
    what = first.describe()
    with shared.changed:
        on_death = shared.on_death
        if on_death is None:
            shared.tell(what)
    if on_death is not None:
        on_death(what)
        with shared.changed:
            shared.tell(what)


def _end(shared: _Shared) -> None:
    """Tells all to stop; whoever does not is killed."""
    shared.closing = True
    for each in shared.processes:
        with suppress(OSError):
            each.channel.send(Stop())
    until = time.monotonic() + END_S
    for each in shared.processes:
        try:
            each.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
        each.channel.close()
        each.links.close()
