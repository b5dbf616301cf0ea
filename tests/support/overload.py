"""A ring of seats on simulated time behind the very policy that ships: who is answered, and when."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.router.admission.capacity import Capacity
from baton.router.admission.queue import FairQueue, QueueBounds, QueuedRequest, QueueEntry, RefusedError


@dataclass(frozen=True)
class Load:
    """Of one tenant: Poisson arrivals."""

    per_second: float
    weight: float = 1.0
    mean_outputs: int = 100
    mean_prompt: int = 200
    patience_s: float | None = None
    """How long its clients want to wait for a whole answer."""


@dataclass
class Account:
    """What became of one tenant's requests."""

    asked: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    answered: int = 0
    in_time: int = 0
    late: int = 0
    """Answered, but too late, or given up while they waited or were answered: work for nothing."""
    tokens: int = 0
    waits: list[float] = field(default_factory=list)


@dataclass(order=True)
class _Event:
    at: float
    number: int
    what: str = field(compare=False)
    tenant: str = field(compare=False)
    entry: QueueEntry | None = field(compare=False, default=None)


class Simulation:
    """``seats`` answers run at once; a prompt takes 0.5 ms a token and an answer 20 ms."""

    PROMPT_S = 0.0005
    OUTPUT_S = 0.02

    def __init__(
        self, loads: Mapping[str, Load], *, seats: int = 16, bounds: QueueBounds | None = None, seed: int = 0
    ) -> None:
        self.loads = loads
        self.accounts = {name: Account() for name in loads}
        self.max_waiting = 0
        self._bounds = bounds or QueueBounds(requests=256, prompt_tokens=1_000_000, max_wait_s=10.0)
        self.queue = FairQueue(self._bounds)
        self._capacity = Capacity(seats)
        self._rng = random.Random(seed)
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._outputs: dict[QueueEntry, int] = {}

    def capacity_per_second(self, load: Load) -> float:
        """Requests that all seats together answer."""
        return self._capacity.seats / (load.mean_prompt * self.PROMPT_S + load.mean_outputs * self.OUTPUT_S)

    def run(self, seconds: float, warm_up_s: float = 0.0) -> None:
        """Counts what comes and ends after ``warm_up_s``."""
        for name in self.loads:
            self._next_arrival(name, 0.0)
        for event in self._until(seconds):
            counts = event.at >= warm_up_s
            if event.what == "arrives":
                self._arrives(event, counts)
            else:
                self._ends(event, counts)
            self._admit(event.at, counts)
            self.max_waiting = max(self.max_waiting, self.queue.waiting)

    def _until(self, seconds: float) -> Iterator[_Event]:
        while self._events and self._events[0].at <= seconds:
            yield heapq.heappop(self._events)

    def _push(self, at: float, what: str, tenant: str, entry: QueueEntry | None = None) -> None:
        heapq.heappush(self._events, _Event(at, next(self._numbers), what, tenant, entry))

    def _next_arrival(self, name: str, now: float) -> None:
        self._push(now + self._rng.expovariate(self.loads[name].per_second), "arrives", name)

    def _arrives(self, event: _Event, counts: bool) -> None:
        load, account = self.loads[event.tenant], self.accounts[event.tenant]
        self._next_arrival(event.tenant, event.at)
        outputs = max(1, round(self._rng.expovariate(1 / load.mean_outputs)))
        asked = QueuedRequest(
            tenant=event.tenant,
            weight=load.weight,
            prompt_tokens=max(1, round(self._rng.expovariate(1 / load.mean_prompt))),
            max_outputs=1000,
            turn=event.at,
            deadline=None if load.patience_s is None else event.at + load.patience_s,
        )
        account.asked += counts
        try:
            entry = self.queue.offer(asked, event.at)
        except RefusedError as error:
            if counts:
                account.refused[error.blame] = account.refused.get(error.blame, 0) + 1
            return
        self._outputs[entry] = min(outputs, 1000)
        until = event.at + self._bounds.max_wait_s
        if asked.deadline is not None:
            until = min(until, asked.deadline)
        self._push(until, "expires", event.tenant, entry)

    def _ends(self, event: _Event, counts: bool) -> None:
        entry, account = event.entry, self.accounts[event.tenant]
        assert entry is not None
        if event.what == "expires":
            if entry.begun is None:
                self.queue.give_up(entry, event.at)
                account.late += counts
            return
        outputs, deadline = self._outputs[entry], entry.asked.deadline
        cut = deadline is not None and event.at >= deadline
        self.queue.end(entry, outputs, not cut, event.at)
        if counts:
            account.answered += 1
            account.late += cut
            account.in_time += not cut
            account.tokens += entry.asked.prompt_tokens + outputs

    def _admit(self, now: float, counts: bool) -> None:
        for entry in self.queue.admit(self._capacity, now):
            takes = entry.asked.prompt_tokens * self.PROMPT_S + self._outputs[entry] * self.OUTPUT_S
            ends = now + takes
            if entry.asked.deadline is not None and ends > entry.asked.deadline:
                ends = entry.asked.deadline  # the workers end it then
            self._push(ends, "ends", entry.asked.tenant, entry)
            if counts:
                self.accounts[entry.asked.tenant].waits.append(now - entry.since)
