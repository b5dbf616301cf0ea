"""What a router keeps of the answers under way, and of the attempts to compute them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.router.ledger import Entry
from baton.router.mailbox import Mailbox
from baton.router.traces.record import Attempt
from baton.router.trail import Trail
from baton.router.types import Request, RingError, TokenChunk
from baton.router.workers import WorkerClient
from baton.urgency import Urgency


@dataclass(slots=True, eq=False)
class Answer:
    """One answer under way: a request of its own to the workers, once it has its first token."""

    request: Request
    group: Group
    entry: Entry = field(default_factory=Entry)
    arrived: Mailbox[TokenChunk | RingError] = field(default_factory=Mailbox)
    closed: bool = False
    """Nobody wants more of it."""


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt, and the workers that know of them.

    Workers compute the prompt once, under the name of the first answer that is not over (``name``), and hand
    it on once. What ends that, ends all of them; from then on each goes its own way.
    """

    prompt_ids: list[int]
    urgency: Urgency
    answers: list[Answer] = field(default_factory=list)
    trail: Trail = field(default_factory=Trail)
    begun: bool = False
    """Somebody wants it."""
    attempt: int = 0
    """That which is under way, or is sought workers for."""
    computing: set[WorkerClient] = field(default_factory=set)
    """Those workers of the attempt that have begun to compute it."""
    was_computed: bool = False
    """Somebody had begun to compute the attempt before this one."""
    revision: str = ""
    """Of the model that computes it."""
    search: asyncio.Task[None] | None = None
    """For workers."""
    name: str = ""
    decode: WorkerClient | None = None
    prefill: WorkerClient | None = None
    parted: bool = False
    """Each answer is a request of its own by now: tokens of the attempt have come from decode."""
    avoided: set[str] = field(default_factory=set)
    """Workers that prefill could not link to, that have no room, or with which the handoff broke."""
    fled: tuple[WorkerClient, float] | None = None
    """The other worker of the last handoff that broke, and when that was: if it has died, it did with this
    on it."""
    refusals: int = 0
    """Attempts in a row of which nothing was begun, since tokens have come."""
    interrupted_at: float | None = None
    """When the attempt before this one ended. None: tokens have come since."""
    error: RingError | None = None
    """With ``interrupted_at``: what the client is told if that was the last attempt."""
    traced: Attempt | None = None
    """The attempt that is under way, or was the last one, for the record."""
    left: WorkerClient | None = None
    """With ``interrupted_at``: the worker that drains, which it left."""

    @property
    def workers(self) -> list[WorkerClient]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    @property
    def going(self) -> list[Answer]:
        """Those that are wanted and not over."""
        return [answer for answer in self.answers if not answer.closed and not answer.entry.finished]

    @property
    def delivered(self) -> int:
        """Tokens that each answer which goes on has at least."""
        return min((len(answer.entry.output_ids) for answer in self.going), default=0)

    @property
    def is_search(self) -> bool:
        """A beam search tells nothing before its end, and then everything."""
        return self.answers[0].request.params.beam_search is not None

    @property
    def turn(self) -> tuple[float, float]:
        """Among those that wait for a worker."""
        return self.urgency.priority, self.urgency.since
