"""Simulated workers, one request at a time: when its prompt is computed, and when its tokens come.

Simpler than real workers, without favour to any scaler: a prompt is computed whole, by the worker that can
begin it first; decode has room for a whole answer before its prompt is computed; the steps of a worker take
the times of `baton.simulated.profile`, and change only when a sequence joins or ends. Every prompt is handed
over.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from baton.engine.pace import StepSpeeds
from baton.simulated.profile import Profile
from loadtest.planner.trace import Request

HANDOVER_S = 0.01
"""The time to the first token besides prefill, in seconds: the router's share, and messages."""


class Clock:
    """Simulated time, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way."""

    came_at: float
    prompt: int
    """Tokens to compute."""
    answer: int
    """Tokens to write."""
    gaps: int
    """The gaps between the tokens of its whole answer."""
    placed_at: float = 0.0
    ttft_s: float | None = None
    slow: float = 0.0
    """Gaps that took too long."""
    joined_slow: float = 0.0
    joined_steps: float = 0.0

    @property
    def room(self) -> int:
        """Tokens of KV."""
        return self.prompt + self.answer

    @property
    def context(self) -> float:
        """Tokens of KV that its steps read, in the mean."""
        return self.prompt + self.answer / 2


@dataclass(slots=True)
class Done:
    """The outcome of all requests."""

    requests: int = 0
    ttft_met: int = 0
    itl_met: int = 0
    both_met: int = 0
    ttfts: list[float] = field(default_factory=list)
    moved: int = 0
    """Answers that went on elsewhere since their worker ended before them."""


class PrefillWorker:
    def __init__(self, clock: Clock, profile: Profile) -> None:
        self._clock = clock
        self._token_s = profile.prefill_ms_per_1k / 1e6
        self._base_s = profile.step_base_ms / 1e3
        self.free_at = 0.0

    def compute(self, tokens: int) -> float:
        """Take ``tokens`` more; return their computing time in seconds."""
        seconds = self._base_s + tokens * self._token_s
        self.free_at = max(self._clock.now, self.free_at) + seconds
        return seconds

    @property
    def backlog_s(self) -> float:
        return max(0.0, self.free_at - self._clock.now)


class DecodeWorker:
    """A decode worker. All its sequences make one token a step, so one count of steps gives the progress of
    each."""

    def __init__(self, clock: Clock, profile: Profile, room: int, itl_s: float) -> None:
        self._clock, self._profile, self._itl_s = clock, profile, itl_s
        self.room = self.spare = room
        self.coming = 0
        """Sequences that have room here and are computed elsewhere."""
        self.steps = self.slow_steps = self.row_steps = self.busy_s = 0.0
        self.pace = StepSpeeds()
        self.jobs: list[tuple[float, int, Job]] = []
        """The jobs by the step of their last token."""
        self._numbers = count()
        self._context = 0.0
        self._step_s = 0.0
        self._since = clock.now
        self._version = 0

    @property
    def empty(self) -> bool:
        return not self.jobs and not self.coming

    def join(self, job: Job, done: Callable[[Job], None]) -> None:
        self._advance()
        job.joined_steps, job.joined_slow = self.steps, self.slow_steps
        self._context += job.context
        heapq.heappush(self.jobs, (self.steps + job.answer - 1, next(self._numbers), job))
        self._plan(done)

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if self.jobs:
            made = passed / self._step_s
            self.steps += made
            self.row_steps += made * len(self.jobs)
            self.busy_s += passed
            if self._step_s > self._itl_s:
                self.slow_steps += made

    def _plan(self, done: Callable[[Job], None]) -> None:
        """Schedule the next end of an answer, at the present step time."""
        self._version += 1
        if self.jobs:
            self._step_s = self._profile.step_s(len(self.jobs), round(self._context), 0)
            self.pace.step(len(self.jobs), 0, self._step_s)
            left = max(0.0, self.jobs[0][0] - self.steps)
            self._clock.at(self._clock.now + left * self._step_s, partial(self._end, self._version, done))

    def _end(self, version: int, done: Callable[[Job], None]) -> None:
        if version != self._version:
            return
        self._advance()
        _, _, job = heapq.heappop(self.jobs)
        self._leave(job)
        self._plan(done)
        done(job)

    def _leave(self, job: Job) -> None:
        job.slow += self.slow_steps - job.joined_slow
        self._context -= job.context
        self.spare += job.room

    def give_up(self) -> list[Job]:
        """Give up all sequences. Return the jobs, each with the rest of its answer and the prompt to be
        computed again."""
        self._advance()
        self._version += 1
        left = [job for _, _, job in self.jobs]
        self.jobs.clear()
        for job in left:
            self._leave(job)
            made = min(job.answer - 1, int(self.steps - job.joined_steps) + 1)
            job.prompt, job.answer = job.prompt + made, job.answer - made
            job.slow += 1
        return left


class Ring:
    """Gives requests to workers. Scalers decide which workers serve: they fill and empty ``prefills`` and
    ``decodes``."""

    def __init__(self, clock: Clock, ttft_s: float, itl_s: float) -> None:
        self.clock, self._ttft_s, self._itl_s = clock, ttft_s, itl_s
        self.prefills: list[PrefillWorker] = []
        self.decodes: list[DecodeWorker] = []
        self.waiting: deque[Job] = deque()
        self.done = Done()
        self.counts = Counts()
        self.on_leave: Callable[[DecodeWorker], None] = lambda worker: None

    def take(self, request: Request) -> None:
        self.counts.see(request)
        job = Job(self.clock.now, request.prompt, request.answer, request.answer - 1)
        self.waiting.append(job)
        self.place()

    def place(self) -> None:
        """Place waiting jobs, in their order, as long as there is room."""
        while self.waiting and self.prefills and self.decodes:
            job = self.waiting[0]
            decode = max(self.decodes, key=lambda worker: worker.spare)
            if decode.spare < job.room:
                return
            self.waiting.popleft()
            job.placed_at = self.clock.now
            decode.spare -= job.room
            decode.coming += 1
            prefill = min(self.prefills, key=lambda worker: worker.free_at)
            self.counts.computed(job.prompt, prefill.compute(job.prompt))
            self.clock.at(prefill.free_at, partial(self._prefilled, job, decode))

    def _prefilled(self, job: Job, decode: DecodeWorker) -> None:
        if job.ttft_s is None:
            job.ttft_s = self.clock.now - job.came_at + HANDOVER_S
        decode.coming -= 1
        if job.answer > 1:
            decode.join(job, partial(self._ended, decode))
        else:
            decode.spare += job.room
            self._ended(decode, job)

    def _ended(self, decode: DecodeWorker, job: Job) -> None:
        assert job.ttft_s is not None
        self.counts.ended(job.gaps + 1)
        done = self.done
        done.requests += 1
        ttft, itl = job.ttft_s <= self._ttft_s, job.slow <= 0.01 * job.gaps
        done.ttft_met += ttft
        done.itl_met += itl
        done.both_met += ttft and itl
        done.ttfts.append(job.ttft_s)
        self.on_leave(decode)
        self.place()

    def move(self, decode: DecodeWorker) -> None:
        """Have a worker's unfinished jobs go on elsewhere."""
        left = decode.give_up()
        self.done.moved += len(left)
        self.waiting.extendleft(reversed(left))
        self.place()

    @property
    def waiting_tokens(self) -> int:
        return sum(job.prompt for job in self.waiting)


@dataclass(slots=True)
class Counts:
    """The counters of the router and its prefill workers."""

    requests: int = 0
    prompt_tokens: int = 0
    prompt_squares: float = 0.0
    answers: int = 0
    answer_tokens: int = 0
    answer_squares: float = 0.0
    computed_tokens: int = 0
    computing_s: float = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        self.computed_tokens += tokens
        self.computing_s += seconds

    def see(self, request: Request) -> None:
        self.requests += 1
        self.prompt_tokens += request.prompt
        self.prompt_squares += request.prompt**2

    def ended(self, tokens: int) -> None:
        self.answers += 1
        self.answer_tokens += tokens
        self.answer_squares += tokens**2
