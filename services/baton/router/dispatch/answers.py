"""The router's state of the answers under way, and of the attempts to compute them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.core.priority import Priority
from baton.router.dispatch.ledger import LedgerEntry
from baton.router.dispatch.mailbox import Mailbox
from baton.router.dispatch.suspects import RetryState
from baton.router.dispatch.types import Request, RingError, TokenChunk
from baton.router.fleet.worker_client import WorkerClient
from baton.router.traces.record import Attempt


@dataclass(slots=True, eq=False)
class Answer:
    """One answer under way: a request of its own to the workers, once decode has sent its first token."""

    request: Request
    group: Group
    entry: LedgerEntry = field(default_factory=LedgerEntry)
    arrived: Mailbox[TokenChunk | RingError] = field(default_factory=Mailbox)
    closed: bool = False
    """Whether the client no longer reads the answer."""


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt, and the workers that know of them.

    Workers compute the prompt once, under the name of the first answer that is not over (``name``), and hand
    it on once. A failure before the end of the handoff concerns all answers; after it each is a request of
    its own.
    """

    prompt_ids: list[int]
    priority: Priority
    answers: list[Answer] = field(default_factory=list)
    retry_state: RetryState = field(default_factory=RetryState)
    begun: bool = False
    """Whether a client has begun to read an answer."""
    attempt: int = 0
    """Number of the attempt that is under way or waits for workers."""
    computing: set[WorkerClient] = field(default_factory=set)
    """Workers of the attempt that have begun to compute it."""
    was_computed: bool = False
    """Whether a worker had begun to compute the previous attempt."""
    revision: str = ""
    """Revision of the model that computes the attempt."""
    search: asyncio.Task[None] | None = None
    """The task that looks for workers, while one does."""
    name: str = ""
    decode: WorkerClient | None = None
    prefill: WorkerClient | None = None
    parted: bool = False
    """Whether each answer is a request of its own by now: decode has sent tokens of the attempt."""
    avoided: set[str] = field(default_factory=set)
    """Workers that prefill could not link to, that have no room, or with which the handoff broke."""
    fled: tuple[WorkerClient, float] | None = None
    """The worker on the other side of the last broken handoff, if it was computing the attempt, and when the
    handoff broke: if that worker has died, it did so with this request on it."""
    refusals: int = 0
    """Attempts refused in a row since tokens last came."""
    interrupted_at: float | None = None
    """The time of the first interruption since tokens last came; None if there was none."""
    error: RingError | None = None
    """The error that the client is told if there is no further attempt; set with ``interrupted_at``."""
    traced: Attempt | None = None
    """The trace of the attempt that is under way, or was the last one."""
    left: WorkerClient | None = None
    """The draining worker that the group has left; set with ``interrupted_at``."""

    @property
    def workers(self) -> list[WorkerClient]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    @property
    def going(self) -> list[Answer]:
        """The answers that are neither closed nor finished."""
        return [answer for answer in self.answers if not answer.closed and not answer.entry.finished]

    @property
    def delivered(self) -> int:
        """The fewest delivered tokens of any answer that is not over."""
        return min((len(answer.entry.output_ids) for answer in self.going), default=0)

    @property
    def is_search(self) -> bool:
        """Whether this is a beam search, which sends all its tokens at its end."""
        return self.answers[0].request.params.beam_search is not None

    @property
    def turn(self) -> tuple[float, float]:
        """The group's sort key among requests that wait for a worker: the least is first."""
        return self.priority.level, self.priority.since
