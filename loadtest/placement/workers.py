"""Simulated workers: steps that take a profile's times, over the block pool that ships."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from baton.core.block_hash import hash_blocks
from baton.engine.kv.block_pool import BlockPool
from baton.engine.pace import StepSpeeds
from loadtest.placement.profile import Profile


class Clock:
    """Simulated time, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass(eq=False, slots=True)
class Job:
    """A request, and its progress."""

    number: int
    came_at: float
    prompt: array[int]
    answer: array[int]
    on_joined: Callable[[], None]
    """Called when decode has taken it over."""
    on_done: Callable[[], None]
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    """Prompt tokens that were not computed."""
    received: int = 0
    """Prompt tokens that decode had already, of a prompt that is handed on."""
    made: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    done_at: float = 0.0
    sending_at: float | None = None
    """The moment from which its first blocks can travel."""
    blocks: list[int] = field(default_factory=list)
    decode_blocks: list[int] = field(default_factory=list)
    decode: Worker | None = None
    """The worker that it is handed on to."""
    gaps: list[float] = field(default_factory=list)
    """The gaps between its tokens, in seconds."""


class Told(NamedTuple):
    """A frame of a worker, with the fields that placement needs."""

    arrives_at: float
    prefill_tokens: int
    sequences: int
    held: int
    spare: int
    tokens_per_s: float
    base_s: float
    row_s: float
    submits_taken: int
    journal_end: int


class Worker:
    """One worker of either role: prompts that wait, in order, and sequences that decode.

    Simpler than the real worker: a sequence gets the blocks of its whole answer when it starts, so no
    sequence is preempted; room at decode is bound when prefill asks for it.
    """

    def __init__(self, clock: Clock, profile: Profile, role: str, address: str) -> None:
        self.clock, self.profile, self.role, self.address = clock, profile, role, address
        self.pool = BlockPool(profile.num_blocks, profile.block_size)
        self.pace = StepSpeeds()
        self.waiting: deque[Job] = deque()
        self.begun: list[Job] = []
        self.running: list[Job] = []
        self.asking: deque[tuple[Job, Worker]] = deque()
        self.outbox: deque[Told] = deque()
        self.submits_taken = 0
        self.link_free_at = 0.0
        self.busy_s = 0.0
        self._stepping = False
        self._told_at = 0.0
        self._tell()

    # --- messages that come in

    def submit(self, job: Job, decode: Worker | None) -> None:
        self.submits_taken += 1
        if decode is None:
            self._queue(job)
        else:
            job.decode = decode
            self.clock.after(self.profile.message_s, lambda: decode._ask(job, self))
        self.heartbeat()

    def _queue(self, job: Job) -> None:
        self.waiting.append(job)
        self._step()

    def _ask(self, job: Job, prefill: Worker) -> None:
        self.asking.append((job, prefill))
        self._grant()

    def _grant(self) -> None:
        """Give room to the jobs that ask, in order."""
        while self.asking:
            job, prefill = self.asking[0]
            blocks = self._take_blocks(job, len(job.prompt) + len(job.answer))
            if blocks is None:
                return
            job.decode_blocks, cached = blocks
            job.received = cached
            self.asking.popleft()
            self.clock.after(self.profile.message_s, partial(prefill._queue, job))

    def _take_blocks(self, job: Job, num_tokens: int) -> tuple[list[int], int] | None:
        """Return blocks for ``num_tokens`` tokens, and how many leading tokens they hold already."""
        size = self.profile.block_size
        cached = self.pool.match_prefix(job.hashes[: (len(job.prompt) - 1) // size])
        fresh = self.pool.allocate(-(-num_tokens // size) - len(cached))
        if fresh is None:
            self.pool.free(cached)
            return None
        return cached + fresh, len(cached) * size

    def _free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self._grant()
        self._step()

    # --- steps

    def _step(self) -> None:
        if self._stepping:
            return
        rows = list(self.running)
        budget = self.profile.mixed_tokens if rows else self.profile.chunk_tokens
        chunks: list[tuple[Job, int]] = []
        for job in self._prompts(budget):
            chunk = min(budget, len(job.prompt) - job.computed)
            if chunk:
                chunks.append((job, chunk))
                budget -= chunk
        if not rows and not chunks:
            return
        tokens = sum(chunk for _, chunk in chunks)
        seconds = self.profile.step_s(len(rows), tokens)
        self._stepping = True
        self.busy_s += seconds
        self.clock.after(seconds, lambda: self._end_step(rows, chunks, tokens, seconds))

    def _prompts(self, budget: int) -> list[Job]:
        """Return the begun jobs, and as many waiting jobs as have room and fit in the budget."""
        left = budget - sum(len(job.prompt) - job.computed for job in self.begun)
        while self.waiting and left > 0 and len(self.running) + len(self.begun) < self.profile.max_running:
            job = self.waiting[0]
            answer = 0 if job.decode is not None else len(job.answer)
            taken = self._take_blocks(job, len(job.prompt) + answer)
            if taken is None:
                break
            job.blocks, job.cached = taken
            job.computed = job.cached
            left -= len(job.prompt) - job.computed
            self.begun.append(self.waiting.popleft())
        return self.begun

    def _end_step(self, rows: list[Job], chunks: list[tuple[Job, int]], tokens: int, seconds: float) -> None:
        now, size = self.clock.now, self.profile.block_size
        self.pace.step(len(rows), tokens, seconds)
        for job in rows:
            job.made += 1
            job.gaps.append(now - job.last_at)
            job.last_at = now
            if job.made == len(job.answer):
                self._finish(job)
        for job, chunk in chunks:
            for at in range(job.computed // size, (job.computed + chunk) // size):
                self.pool.commit(job.blocks[at], job.hashes[at])
            job.computed += chunk
            job.sending_at = job.sending_at or now
            if job.computed == len(job.prompt):
                self._prefilled(job)
        if rows or any(job.computed == len(job.prompt) for job, _ in chunks):
            self._tell()
        self._stepping = False
        self._step()

    def _prefilled(self, job: Job) -> None:
        self.begun.remove(job)
        job.made, job.first_at, job.last_at = 1, self.clock.now, self.clock.now
        if job.decode is not None:
            self._hand_on(job, job.decode)
        elif job.made == len(job.answer):
            self._finish(job)
        else:
            self.running.append(job)

    def _hand_on(self, job: Job, decode: Worker) -> None:
        """Send the blocks that decode lacks, as soon as the link is free; the last chunk's blocks when they
        are computed."""
        per_s = self.profile.link_bytes_per_s / self.profile.kv_bytes_per_token
        missing = len(job.prompt) - job.received
        begins = max(job.sending_at or 0.0, self.link_free_at)
        late = min(missing, self.profile.chunk_tokens)
        done = max(begins + missing / per_s, self.clock.now + late / per_s)
        self.link_free_at = done
        self.clock.after(done - self.clock.now, lambda: self._free(job.blocks))
        self.clock.after(done - self.clock.now + 2 * self.profile.message_s, lambda: decode._join(job))

    def _join(self, job: Job) -> None:
        job.on_joined()
        job.blocks = job.decode_blocks
        for at in range(len(job.prompt) // self.profile.block_size):
            self.pool.commit(job.blocks[at], job.hashes[at])
        if job.made == len(job.answer):
            self._finish(job)
        else:
            self.running.append(job)
            self._step()

    def _finish(self, job: Job) -> None:
        if job in self.running:
            self.running.remove(job)
        job.done_at = self.clock.now
        full = (len(job.prompt) + len(job.answer) - 1) // self.profile.block_size
        for at in range(full):
            self.pool.commit(job.blocks[at], job.hashes[at])
        self._free(job.blocks)
        job.on_done()

    # --- messages that go out

    def heartbeat(self) -> None:
        """Send a report if one is due although there are no tokens."""
        if self.clock.now - self._told_at >= self.profile.heartbeat_s:
            self._tell()

    def _tell(self) -> None:
        self._told_at = self.clock.now
        pool = self.pool
        queued = sum(len(job.prompt) - job.computed for job in self.begun)
        for job in self.waiting:
            cached = 0
            for digest in job.hashes[: (len(job.prompt) - 1) // self.profile.block_size]:
                if pool.find(digest) is None:
                    break
                cached += self.profile.block_size
            queued += len(job.prompt) - cached
        told = Told(
            self.clock.now + self.profile.message_s,
            queued,
            len(self.running) + len(self.begun) + len(self.waiting),
            pool.num_held,
            pool.num_allocatable,
            self.pace.prefill_tokens_per_s,
            self.pace.base_s,
            self.pace.row_s,
            self.submits_taken,
            pool.journal.end,
        )
        self.outbox.append(told)


def named(job: Job, block_size: int) -> Job:
    """Give the job the digests of all its blocks, and return it."""
    job.hashes = hash_blocks(job.prompt + job.answer, block_size)
    return job
