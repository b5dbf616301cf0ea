"""What is done to a running fleet. Every fault proves that it took effect, or raises FaultError."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.support.chaos import connections
from tests.support.chaos.catalogue import Question
from tests.support.chaos.client import ChaosClient, Reply
from tests.support.chaos.connections import MANNERS, Connection
from tests.support.chaos.findings import Findings
from tests.support.chaos.fleet import Fleet, Member

CutKind = Literal["control", "data", "library", "router"]
CUT_KINDS: tuple[CutKind, ...] = ("control", "data", "library", "router")
"""Prefill to decode: the gRPC stream, the connector's socket, other sockets of its library (UCX over TCP,
gloo); router to worker."""
MAX_FREEZE_S = 6.0
PACES = (3 << 20, 10 << 20, 30 << 20, 1 << 40)
"""Bytes per second. A prompt of 600 tokens has 5 MiB of blocks."""
TRANSFER_WITHIN_S = 2.0
MAX_STALL_S = 1.5
"""Shorter than silence may last: the link must live."""
MAX_ABSENCE_S = 2.0
CUT_SHOWS_S = 15.0
LEAVING_SHOWS_S = 15.0
MAX_TALK_S = 60.0
FIND_S = 15.0
CHAT = 'endpoint="/v1/chat/completions"'


class FaultError(Exception):
    """A fault did not take effect."""


@dataclass(frozen=True)
class Done:
    """A fault that took effect."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass
class Talk:
    """A client that is going to leave."""

    question: Question
    stream: bool
    reply: Reply = field(default_factory=Reply)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    enough: int | None = None
    """Tokens after which it leaves, whatever else happens."""
    left_at: float = 0.0
    answered: bool = False
    """It had the end of its answer before it could leave."""

    def wants_more(self, reply: Reply) -> bool:
        return self.enough is None or len(reply.token_ids) < self.enough


def streams_alone(found: list[tuple[Connection, Member]]) -> list[tuple[Connection, Member]]:
    """Leave out workers with which the router has several connections: one of them carries the beats of a
    router that is late, which one nobody sees, and it may be lost without a word."""
    count = Counter(member.name for _, member in found)
    return [(connection, member) for connection, member in found if count[member.name] == 1]


@dataclass(frozen=True)
class _Chats:
    """How requests to the chat endpoint ended, as the router counts them. Only those ask there who leave."""

    ended: int
    finished: int
    failed: int

    def __sub__(self, other: _Chats) -> _Chats:
        ended, finished, failed = (
            getattr(self, f.name) - getattr(other, f.name) for f in dataclasses.fields(self)
        )
        return _Chats(ended, finished, failed)


class Faults:
    """Injects faults of every kind; what must happen later (thaw, restart) runs in ``tails``."""

    def __init__(
        self,
        fleet: Fleet,
        client: ChaosClient,
        long: tuple[Question, ...],
        findings: Findings,
    ) -> None:
        self._fleet = fleet
        self._rng = fleet.rng
        self._client = client
        self._long = long
        self._findings = findings
        self.tails: set[asyncio.Task[None]] = set()

    async def settle(self) -> None:
        """Wait until every worker runs again."""
        while self.tails:
            await asyncio.gather(*self.tails)

    def _later(self, work: asyncio.Task[None]) -> None:
        self.tails.add(work)
        work.add_done_callback(self.tails.discard)

    # --- processes

    async def kill(self) -> Done:
        """SIGKILL a worker, stopped or not, but never the last of its role; it comes back by and by."""
        victims = [m for m in self._fleet.in_state("up", "frozen") if self._fleet.spare(m)]
        if not victims:
            return await self.freeze()
        member = self._rng.choice(victims)
        was = member.state
        await self.end(member, signal.SIGKILL)
        absence = self._rng.choice((0.0, self._rng.uniform(0, MAX_ABSENCE_S)))
        self._later(asyncio.create_task(self._come_back(member, absence)))
        return Done(f"kill -9 {member.role}", f"{member.name} ({was}), back after {absence:.1f} s")

    @staticmethod
    async def end(member: Member, number: signal.Signals) -> None:
        """End a worker by a signal, and see that it ended as it should."""
        member.state = "down"
        try:
            await asyncio.to_thread(member.service.kill, number)
        except subprocess.TimeoutExpired as error:
            raise FaultError(f"{member.name} did not end within {error.timeout} s of {number.name}") from None
        status = member.service.process.returncode
        if status != (-number if number == signal.SIGKILL else 0):
            raise FaultError(f"{member.name} ended with {status} after {number.name}")

    async def _come_back(self, member: Member, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await member.restart()
        except RuntimeError as error:
            self._findings.violation(f"{member.name} did not start again", str(error).splitlines()[-20:])

    async def freeze(self) -> Done:
        """SIGSTOP a worker for a while, but never the last of its role."""
        victims = [m for m in self._fleet.in_state("up") if self._fleet.spare(m)]
        if not victims:
            return await self.leave()
        member = self._rng.choice(victims)
        length = self._rng.uniform(0.1, self._rng.choice((1.5, MAX_FREEZE_S)))
        self._stop(member, length)
        return Done(f"SIGSTOP {member.role}", f"{member.name} for {length:.1f} s")

    def _stop(self, member: Member, length_s: float) -> None:
        member.service.freeze()
        member.state = "frozen"
        self._later(asyncio.create_task(self._thaw(member, member.pid, length_s)))

    async def _thaw(self, member: Member, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if member.pid == pid and member.state == "frozen":
            member.service.thaw()
            member.state = "up"

    async def stall(self) -> Done:
        """SIGSTOP a worker while prompts are handed on, have their clients leave, and SIGCONT: what was to
        arrive then arrives late, when its place may have been given to others."""
        victims = [m for m in self._fleet.in_state("up") if self._fleet.spare(m)]
        if not victims:
            return await self.leave()
        member = self._rng.choice(victims)
        length = self._rng.uniform(0.05, MAX_STALL_S)
        stopped = asyncio.Event()

        async def when_stopped(talk: Talk) -> None:
            await talk.sent.wait()
            await stopped.wait()

        stopping = asyncio.create_task(self._stop_in_transfer(member, length, stopped))
        left = await self.leave_together(self._rng.randint(3, 6), when_stopped)
        await stopping
        kind = "stall" if left else "SIGSTOP"  # all were too late
        return Done(
            f"{kind} {member.role}", f"{member.name} for {length:.2f} s while {len(left)} clients left"
        )

    async def _stop_in_transfer(self, member: Member, length_s: float, stopped: asyncio.Event) -> None:
        """Stop a worker while blocks come or go, if they do so soon."""
        deadline = time.monotonic() + TRANSFER_WITHIN_S
        while time.monotonic() < deadline:
            if await asyncio.to_thread(member.transfers):
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(self._rng.uniform(0, 0.03))
        self._stop(member, length_s)
        stopped.set()

    # --- clients

    async def leave(self) -> Done:
        """Several clients leave in the middle of a long answer."""
        deadline = time.monotonic() + FIND_S
        while time.monotonic() < deadline:
            if left := await self.leave_together(self._rng.randint(1, 5)):
                tokens = ", ".join(str(len(talk.reply.token_ids)) for talk in left)
                return Done("leave", f"{len(left)} clients, having got {tokens} tokens")
        raise FaultError(f"within {FIND_S} s no client got to leave in mid-answer")

    async def leave_together(
        self, count: int, until: Callable[[Talk], Awaitable[None]] | None = None
    ) -> list[Talk]:
        """``count`` clients ask and leave: each when ``until`` returns, or at any moment. Those that left an
        answer unfinished, as the router confirms; others failed before, or had their answer."""
        before = await self._chats()
        talks = await asyncio.gather(*(self._talk(until or self._any_moment) for _ in range(count)))
        for talk in talks:
            self._findings.check(talk.question, talk.reply)
        left = [talk for talk in talks if talk.reply.failure is None and not talk.answered]
        answered = sum(talk.answered for talk in talks)
        deadline = time.monotonic() + LEAVING_SHOWS_S
        while (seen := await self._chats() - before).ended < count:
            if time.monotonic() > deadline:
                raise FaultError(f"{count} clients left; the router has noticed {seen.ended} of them")
            await asyncio.sleep(0.01)
        if seen.finished > answered:
            late = seen.finished - answered
            raise FaultError(f"{late} of {count} clients left after the end of their answers")
        # An answer that failed unseen, in the moment in which its client left, was not disturbed by that.
        unseen = max(0, seen.failed - sum(talk.reply.failure is not None for talk in talks))
        return left[: len(left) - unseen]

    async def _talk(self, until: Callable[[Talk], Awaitable[None]]) -> Talk:
        """Ask for a long answer, and leave."""
        talk = Talk(self._rng.choice(self._long), stream=self._rng.random() < 0.7)
        asking = asyncio.create_task(
            self._client.ask(
                talk.question,
                stream=talk.stream,
                reply=talk.reply,
                on_sent=talk.sent.set,
                on_tokens=talk.wants_more,
            )
        )
        leaving = asyncio.ensure_future(until(talk))
        await asyncio.wait([asking, leaving], return_when=asyncio.FIRST_COMPLETED)
        talk.answered = asking.done() and talk.reply.failure is None
        leaving.cancel()
        asking.cancel()
        await asyncio.gather(asking, leaving, return_exceptions=True)
        talk.left_at = time.monotonic()
        return talk

    async def _any_moment(self, talk: Talk) -> None:
        """From just after the request was sent to so many tokens later."""
        if talk.stream and self._rng.random() < 0.6:
            talk.enough = self._rng.randint(1, 80)
            await asyncio.sleep(MAX_TALK_S)
        await talk.sent.wait()
        await asyncio.sleep(self._rng.uniform(0.0, 0.4) ** 2)

    async def _chats(self) -> _Chats:
        metrics = await asyncio.to_thread(self._fleet.router_metrics)
        choices = {k: int(v) for k, v in metrics.items() if k.startswith("baton_choices_total{" + CHAT)}
        return _Chats(
            ended=sum(int(v) for k, v in metrics.items() if k.startswith("baton_requests_total{" + CHAT)),
            finished=sum(v for k, v in choices.items() if '"stop"' in k or '"length"' in k),
            failed=sum(v for k, v in choices.items() if '"error"' in k),
        )

    # --- connections

    async def cut(self) -> Done:
        """Break a connection of a kind that there is, between two workers that run, or to the router."""
        deadline = time.monotonic() + FIND_S
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self._connections)
            kinds = [kind for kind in CUT_KINDS if found[kind]]
            if kinds:
                kind = self._rng.choice(kinds)
                if done := await self._cut(kind, *self._rng.choice(found[kind])):
                    return done
            await asyncio.sleep(0.05)
        raise FaultError(f"within {FIND_S} s there was no connection to cut")

    def _connections(self) -> dict[CutKind, list[tuple[Connection, Member]]]:
        """By kind, each with the worker that serves it."""
        running = {m.pid: m for m in self._fleet.in_state("up")}
        router = self._fleet.ring.router.process.pid
        found: dict[CutKind, list[tuple[Connection, Member]]] = {kind: [] for kind in CUT_KINDS}
        for connection in connections.between({**running, router: None}):
            members = [running[pid] for pid in connection.pids if pid in running]
            server = next((m for m in members if connection.ports & m.ports), None)
            if router in connection.pids:
                found["router"].append((connection, members[0]))
            elif server is None:
                decode = next(m for m in members if m.role == "decode")
                found["library"].append((connection, decode))
            elif server.grpc_port in connection.ports:
                found["control"].append((connection, server))
            else:
                found["data"].append((connection, server))
        found["router"] = streams_alone(found["router"])
        return found

    async def pace(self) -> None:
        """Give every connection on which blocks travel a speed of its own, mostly so low that much is under
        way at any moment. What a library moves through shared memory keeps its speed."""
        found = await asyncio.to_thread(self._connections)
        for connection, _ in found["data"] + found["library"]:
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.pace(self._rng.choice(PACES))

    async def _cut(self, kind: CutKind, connection: Connection, server: Member) -> Done | None:
        """What was cut; None if it was closed before that."""
        manner, at = self._rng.choice(MANNERS), self._rng.randrange(2)
        marks = {name: log.size() for name, log in self._fleet.logs.items()}
        try:
            connection.cut(manner, at)
        except OSError:
            return None
        done = Done(f"cut {kind}", f"({manner}) of {server.name}, ports {sorted(connection.ports)}")
        deadline = time.monotonic() + CUT_SHOWS_S
        while not await asyncio.to_thread(self._shows, kind, connection, server, marks):
            if time.monotonic() > deadline:
                ends = [f"pid {end.pid} fd {end.fd}" for end in connection.ends if end.open]
                raise FaultError(f"{done}: not noticed within {CUT_SHOWS_S} s; still open: {ends or 'none'}")
            await asyncio.sleep(0.01)
        return done

    def _shows(self, kind: CutKind, connection: Connection, server: Member, marks: dict[str, int]) -> bool:
        """Whether both ends have closed the connection, and the one that lost it says so. A library may keep
        a dead connection open until its next use: that no byte can go through it must do."""
        if kind == "library":
            return not connection.established
        if not connection.gone:
            return False
        if kind == "router":
            name, line = self._fleet.ring.router.name, f"worker 127.0.0.1:{server.grpc_port} is lost"
        else:
            name, line = server.name, "is fenced"
        return line.encode() in self._fleet.logs[name].since(marks[name])
