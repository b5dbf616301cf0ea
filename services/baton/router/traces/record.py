"""What is noted of a request as it goes: when it got on, which attempts there were, and what workers told.

Times are seconds of this process's ``time.perf_counter``. Workers tell durations on clocks of their own, and
these are never compared: a duration is laid between two moments of this clock, and what is left over is
called network. Nothing here happens for a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.placement import Decision, WorkerReport
from baton.router.placement.policy import Candidate
from baton.router.traces.origin import Origin
from baton.v1 import worker_pb2 as pb

MOST_ATTEMPTS = 16
"""Of one answer that are kept: the first, and the last ones."""
MOST_CANDIDATES = 16
"""Of one placement that are kept."""
LONGEST_CONNECTOR = 32
LONGEST_WHY = 512


class Placed(NamedTuple):
    """A placement: what it was made from, and what came of it."""

    num_tokens: int
    chosen: Candidate
    considered: tuple[Candidate, ...]
    """The chosen one among them."""
    reports: tuple[WorkerReport, ...]
    """What was known of the workers that were compared."""

    @classmethod
    def of(cls, decision: Decision, report_of: Callable[[str], WorkerReport]) -> Placed:
        chosen = decision.chosen
        others = [each for each in decision.considered if each is not chosen]
        considered = (chosen, *others[: MOST_CANDIDATES - 1])
        named = dict.fromkeys(
            address for each in considered for address in (each.prefill, each.decode) if address is not None
        )
        return cls(decision.prompt.num_tokens, chosen, considered, tuple(map(report_of, named)))


class Compute(NamedTuple):
    """What the worker told that computed the prompt: seconds, one after the other, but for ``at``."""

    at: float
    """When that came."""
    link: float
    room: float
    queue: float
    compute: float
    publish: float
    preemptions: int
    cached_tokens: int

    @classmethod
    def of(cls, told: pb.ComputePhases, at: float) -> Compute:
        return cls(
            at,
            told.link_us / 1e6,
            told.room_us / 1e6,
            told.queue_us / 1e6,
            told.compute_us / 1e6,
            told.publish_us / 1e6,
            told.preemptions,
            told.cached_tokens,
        )


class Handoff(NamedTuple):
    """What decode told when it had taken the request over, likewise. The first four went beside prefill's
    computing."""

    at: float
    room: float
    wait: float
    grant: float
    transfer: float
    flush: float
    commit: float
    connector: str

    @classmethod
    def of(cls, told: pb.HandoffPhases, at: float) -> Handoff:
        return cls(
            at,
            told.room_us / 1e6,
            told.wait_us / 1e6,
            told.grant_us / 1e6,
            told.transfer_us / 1e6,
            told.flush_us / 1e6,
            told.commit_us / 1e6,
            told.connector[:LONGEST_CONNECTOR],
        )


class Join(NamedTuple):
    """What decode told of its first step, likewise."""

    at: float
    queue: float
    step: float
    publish: float

    @classmethod
    def of(cls, told: pb.JoinPhases, at: float) -> Join:
        return cls(at, told.queue_us / 1e6, told.step_us / 1e6, told.publish_us / 1e6)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to compute one answer, or several that were under way as one."""

    number: int
    submitted: float
    decode: str
    """The worker's address, as ``prefill``."""
    prefill: str | None
    placed: Placed
    started: float | None = None
    """A worker said that it begins to compute."""
    compute: Compute | None = None
    handoff: Handoff | None = None
    join: Join | None = None
    ended: float | None = None
    """When it was given up; None: it is under way, or was the last one."""
    why: str = ""
    """It ended."""

    def tell(self, phases: pb.Phases, now: float) -> None:
        """Whatever is told twice counts once. Nothing of the message is kept, which would keep its frame."""
        match phases.WhichOneof("part"):
            case "compute" if self.compute is None:
                self.compute = Compute.of(phases.compute, now)
            case "handoff" if self.handoff is None:
                self.handoff = Handoff.of(phases.handoff, now)
            case "join" if self.join is None:
                self.join = Join.of(phases.join, now)

    def end(self, now: float, why: str = "") -> None:
        """It was given up. What is said first counts."""
        if self.ended is None:
            self.ended = now
        self.why = self.why or why[:LONGEST_WHY]


class Delivered(NamedTuple):
    """What a client got of one answer so far."""

    first: float
    """When its first token went out; 0.0: none has."""
    last: float
    tokens: int
    finished: bool = False
    """That was all of it."""


@dataclass(slots=True, eq=False)
class AnswerTrace:
    """Of one choice."""

    index: int
    attempts: list[Attempt] = field(default_factory=list)
    left_out: int = 0
    """Attempts that are not kept."""

    def begun(self, attempt: Attempt) -> None:
        if len(self.attempts) == MOST_ATTEMPTS:
            del self.attempts[1]
            self.left_out += 1
        self.attempts.append(attempt)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTrace:
    """Of one request, with all its choices."""

    request_id: str
    """As the answer's ``id``."""
    endpoint: str
    model: str
    tenant: str
    origin: Origin
    prompt_tokens: int
    arrived: float
    answers: list[AnswerTrace]
    read: float = field(default_factory=time.perf_counter)
    """It was understood and tokenized."""
    admitted: float | None = None
    """Its tenant's limits had room."""
    turn: float | None = None
    """The queue in front of the ring had let it through."""
    ended: float | None = None
    outcome: str = "running"
    """Then as in the audit log: completed, cancelled, or an error's code."""
    wall: float = 0.0
    """When it arrived, in seconds since 1970. For people: nothing is computed from it."""
    deliveries: Callable[[], list[Delivered]] | None = None
    """While it runs, who knows them."""
    _delivered: list[Delivered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wall = time.time() - (time.perf_counter() - self.arrived)

    @property
    def key(self) -> str:
        """The random part of its id."""
        return key_of(self.request_id)

    @property
    def delivered(self) -> list[Delivered]:
        """For each choice; empty before its turn."""
        return self._delivered if self.deliveries is None else self.deliveries()

    def seen(self) -> RequestTrace:
        """As it is now, to be read as often as is liked: what runs has its deliveries counted once."""
        copied = copy(self)
        copied._delivered, copied.deliveries = self.delivered, None
        return copied

    def end(self, outcome: str) -> None:
        self.ended = time.perf_counter()
        self.outcome = outcome
        self._delivered, self.deliveries = self.delivered, None


def key_of(request_id: str) -> str:
    """``chatcmpl-0af3…`` → ``0af3…``; what has no prefix is itself."""
    return request_id.replace("_", "-").rpartition("-")[2]
