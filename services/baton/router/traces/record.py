"""The record of a request: the times of its steps, its attempts, and what workers reported.

Times are seconds of this process's ``time.perf_counter``. Workers report durations, measured on their own
clocks, which are never compared: a duration is fitted between two moments of this clock, and the rest is
called network. Nothing here runs per token.
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

MAX_ATTEMPTS = 16
"""Most attempts of one answer that are kept: the first, and the last ones."""
MAX_CANDIDATES = 16
"""Most candidates of one placement that are kept."""
MAX_CONNECTOR = 32
MAX_WHY = 512


class Placed(NamedTuple):
    """A placement: its inputs, and the candidate that was chosen."""

    num_tokens: int
    chosen: Candidate
    considered: tuple[Candidate, ...]
    """The candidates compared, the chosen one first."""
    reports: tuple[WorkerReport, ...]
    """The reports of the workers that were compared."""

    @classmethod
    def of(cls, decision: Decision, report_of: Callable[[str], WorkerReport]) -> Placed:
        chosen = decision.chosen
        others = [each for each in decision.considered if each is not chosen]
        considered = (chosen, *others[: MAX_CANDIDATES - 1])
        named = dict.fromkeys(
            address for each in considered for address in (each.prefill, each.decode) if address is not None
        )
        return cls(decision.prompt.num_tokens, chosen, considered, tuple(map(report_of, named)))


class ComputeTimings(NamedTuple):
    """The durations reported by the worker that computed the prompt: consecutive, in seconds, but for
    ``at``."""

    at: float
    """The time the report came."""
    link: float
    room: float
    queue: float
    compute: float
    publish: float
    preemptions: int
    cached_tokens: int

    @classmethod
    def of(cls, told: pb.ComputePhases, at: float) -> ComputeTimings:
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


class HandoffTimings(NamedTuple):
    """The durations reported by the decode worker when it had taken over the request, in seconds. ``room`` to
    ``transfer`` overlap with the computation of the prompt."""

    at: float
    room: float
    wait: float
    grant: float
    transfer: float
    flush: float
    commit: float
    connector: str

    @classmethod
    def of(cls, told: pb.HandoffPhases, at: float) -> HandoffTimings:
        return cls(
            at,
            told.room_us / 1e6,
            told.wait_us / 1e6,
            told.grant_us / 1e6,
            told.transfer_us / 1e6,
            told.flush_us / 1e6,
            told.commit_us / 1e6,
            told.connector[:MAX_CONNECTOR],
        )


class FirstStepTimings(NamedTuple):
    """The durations reported by the decode worker for its first step: consecutive, in seconds."""

    at: float
    queue: float
    step: float
    publish: float

    @classmethod
    def of(cls, told: pb.JoinPhases, at: float) -> FirstStepTimings:
        return cls(at, told.queue_us / 1e6, told.step_us / 1e6, told.publish_us / 1e6)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to compute one answer, or several answers together."""

    number: int
    submitted: float
    decode: str
    """The decode worker's address; ``prefill`` is the prefill worker's."""
    prefill: str | None
    placed: Placed
    started: float | None = None
    """The time a worker reported that it begins to compute."""
    compute: ComputeTimings | None = None
    handoff: HandoffTimings | None = None
    join: FirstStepTimings | None = None
    ended: float | None = None
    """The time the attempt was given up. None: it is under way, or was the last one."""
    why: str = ""
    """The reason the attempt ended."""

    def tell(self, phases: pb.Phases, now: float) -> None:
        """Note a report. A second report of the same kind is ignored. No part of the message is kept, as it
        would keep its frame alive."""
        match phases.WhichOneof("part"):
            case "compute" if self.compute is None:
                self.compute = ComputeTimings.of(phases.compute, now)
            case "handoff" if self.handoff is None:
                self.handoff = HandoffTimings.of(phases.handoff, now)
            case "join" if self.join is None:
                self.join = FirstStepTimings.of(phases.join, now)

    def end(self, now: float, why: str = "") -> None:
        """Note that the attempt was given up. The first time and reason count."""
        if self.ended is None:
            self.ended = now
        self.why = self.why or why[:MAX_WHY]


class Delivered(NamedTuple):
    """The part of one answer that was delivered to the client so far."""

    first: float
    """The time the first token was sent. 0.0: none has been."""
    last: float
    tokens: int
    finished: bool = False
    """Whether the answer is complete."""


@dataclass(slots=True, eq=False)
class AnswerTrace:
    """The trace of one choice."""

    index: int
    attempts: list[Attempt] = field(default_factory=list)
    left_out: int = 0
    """The number of attempts that are not kept."""

    def begun(self, attempt: Attempt) -> None:
        if len(self.attempts) == MAX_ATTEMPTS:
            del self.attempts[1]
            self.left_out += 1
        self.attempts.append(attempt)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTrace:
    """The trace of one request, with all its choices."""

    request_id: str
    """The ``id`` of the answer."""
    endpoint: str
    model: str
    tenant: str
    origin: Origin
    prompt_tokens: int
    arrived: float
    answers: list[AnswerTrace]
    read: float = field(default_factory=time.perf_counter)
    """The time the request was parsed and tokenized."""
    admitted: float | None = None
    """The time the tenant's limits admitted the request."""
    turn: float | None = None
    """The time the queue in front of the ring released the request."""
    ended: float | None = None
    outcome: str = "running"
    """The outcome: "running", then as in the audit log: completed, cancelled, or an error's code."""
    wall: float = 0.0
    """The time of arrival in seconds since 1970. For display: nothing is computed from it."""
    deliveries: Callable[[], list[Delivered]] | None = None
    """Returns the deliveries while the request runs."""
    _delivered: list[Delivered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wall = time.time() - (time.perf_counter() - self.arrived)

    @property
    def key(self) -> str:
        """The random part of the request's id."""
        return key_of(self.request_id)

    @property
    def delivered(self) -> list[Delivered]:
        """The deliveries of each choice. Empty while the request is queued."""
        return self._delivered if self.deliveries is None else self.deliveries()

    def seen(self) -> RequestTrace:
        """Return a snapshot, in which the deliveries of a running request are counted once for all reads."""
        copied = copy(self)
        copied._delivered, copied.deliveries = self.delivered, None
        return copied

    def end(self, outcome: str) -> None:
        self.ended = time.perf_counter()
        self.outcome = outcome
        self._delivered, self.deliveries = self.delivered, None


def key_of(request_id: str) -> str:
    """Return the random part of an id: ``chatcmpl-0af3…`` → ``0af3…``. An id without a prefix is returned
    unchanged."""
    return request_id.replace("_", "-").rpartition("-")[2]
