"""The queue in front of the ring, at work: who has come waits here for its turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from baton.router.admission.capacity import Capacity
from baton.router.admission.queue import Asked, Bounds, Entry, FairQueue, RefusedError
from baton.router.types import deadline_exceeded
from baton.telemetry.admission import AdmissionMetrics, AdmissionView

GIVEN_UP = 3.0
"""Times the longest wait, after which a request that was to come in time is refused after all: the others
were refused at once by an estimate, and to turn away whoever waits for a little longer than that said wastes
the wait."""
LOOK_S = 0.1
"""How often it is seen whether there is more room now, beside whenever a request has ended."""


class Gate:
    """Event loop's thread only.

    ``capacity`` tells what may be open; None while nobody knows: then what was known last holds, and before
    that everybody is let in, as the ring itself has room for those that wait for a first worker.
    """

    def __init__(
        self, bounds: Bounds, capacity: Callable[[], Capacity | None], metrics: AdmissionMetrics
    ) -> None:
        self._bounds = bounds
        self._queue = FairQueue(bounds)
        self._capacity = capacity
        self._metrics = metrics
        self._known: Capacity | None = None
        self._turns: dict[Entry, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None
        metrics.watch(self.view)

    def view(self) -> AdmissionView:
        queue = self._queue
        return AdmissionView(
            queue.waiting,
            queue.waiting_prompt_tokens,
            queue.open_answers,
            queue.open_tokens,
            0 if self._known is None else self._known.seats,
        )

    def turn(self, asked: Asked) -> Turn:
        """For one request, as an async context manager around its answers."""
        return Turn(self, asked)

    def check(self, asked: Asked) -> None:
        """Raises RefusedError if it would be refused now."""
        with self._counting(asked):
            self._queue.check(asked, time.monotonic())

    @contextmanager
    def _counting(self, asked: Asked) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self._metrics.refused.labels(asked.tenant, error.blame).inc()
            raise

    async def enter(self, asked: Asked) -> Entry:
        """Wait until it is let in. Raises RefusedError, now if it would wait for too long, and RingError when
        its deadline has passed."""
        with self._counting(asked):
            entry = self._queue.offer(asked, time.monotonic())
        self._admit()
        if entry.begun is None:
            await self._wait(entry)
        assert entry.begun is not None
        self._metrics.wait.observe(entry.begun - entry.since)
        return entry

    async def _wait(self, entry: Entry) -> None:
        turn = self._turns[entry] = asyncio.get_running_loop().create_future()
        until = entry.since + GIVEN_UP * self._bounds.longest_wait_s
        deadline = entry.asked.deadline
        # Not told by the clock when it is over: a timer may be a little early.
        by_deadline = deadline is not None and deadline <= until
        if deadline is not None:
            until = min(until, deadline)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await turn
        except TimeoutError:
            if entry.begun is None:  # else its turn came in the very moment
                raise self._expired(entry, by_deadline) from None
        except BaseException:
            if entry.begun is not None:  # let in, in the very moment in which nobody wanted it any more
                self.leave(entry, 0, completed=False, ran=False)
            raise
        finally:
            del self._turns[entry]
            if entry.begun is None:
                self._queue.give_up(entry, time.monotonic())

    def _expired(self, entry: Entry, by_deadline: bool) -> Exception:
        self._metrics.refused.labels(entry.asked.tenant, "timeout").inc()
        if by_deadline:
            return deadline_exceeded()
        return RefusedError("overall", "its turn did not come in time", self._retry_s())

    def _retry_s(self) -> float:
        rate = self._queue.pace.per_second(self._queue.open_requests)
        return 1.0 if rate is None else self._queue.waiting_tokens / rate / 4

    def leave(self, entry: Entry, outputs: int, *, completed: bool, ran: bool = True) -> None:
        """An open request is over. One that never ``ran`` has used nothing, its prompt neither."""
        used = entry.asked.prompt_tokens + outputs if ran else 0
        self._queue.end(entry, outputs, completed, time.monotonic(), ran=ran)
        self._metrics.admitted_tokens.labels(entry.asked.tenant).inc(used)
        if self._queue.waiting:
            self._admit()

    def _admit(self) -> None:
        self._known = self._capacity() or self._known
        room = self._known or Capacity(seats=1 << 30)
        for entry in self._queue.admit(room, time.monotonic()):
            turn = self._turns.get(entry)
            if turn is not None and not turn.done():
                turn.set_result(None)
        if self._queue.waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._admit()


class Turn:
    """One request's way in and out."""

    def __init__(self, gate: Gate, asked: Asked) -> None:
        self._gate = gate
        self._asked = asked
        self._entry: Entry | None = None
        self._outputs = 0

    def generated(self, tokens: int) -> None:
        self._outputs += tokens

    async def __aenter__(self) -> Turn:
        self._entry = await self._gate.enter(self._asked)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entry is not None
        self._gate.leave(self._entry, self._outputs, completed=kind is None)


def retry_after(seconds: float) -> int:
    """Whole seconds, as a header tells them."""
    return max(1, min(3600, math.ceil(seconds)))
