"""The queue in front of the ring, with its clock and timers: requests wait here for their turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.router.admission.capacity import Capacity
from baton.router.admission.queue import FairQueue, QueueBounds, QueuedRequest, QueueEntry, RefusedError
from baton.router.dispatch.types import deadline_exceeded
from baton.telemetry.admission import AdmissionMetrics, AdmissionView

GIVEN_UP = 3.0
"""The factor on the longest wait after which a request that waits is refused after all. Other requests were
refused at once by an estimate; to refuse one that waits a little longer than its estimate would waste its
wait."""
LOOK_S = 0.1
"""The time between two looks for more room, in seconds. The end of a request also leads to a look."""


class Gate:
    """Lets requests in by turn. Event loop's thread only.

    ``capacity`` returns what may be open, and None while that is unknown: then the last known value holds,
    and before there is one every request is let in, as the ring itself has room for requests that wait for a
    first worker.
    """

    def __init__(
        self, bounds: QueueBounds, capacity: Callable[[], Capacity | None], metrics: AdmissionMetrics
    ) -> None:
        self._bounds = bounds
        self._queue = FairQueue(bounds)
        self._capacity = capacity
        self._metrics = metrics
        self._known: Capacity | None = None
        self._turns: dict[QueueEntry, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None
        metrics.watch(self.view, self._queue.tenants)

    def view(self) -> AdmissionView:
        queue = self._queue
        return AdmissionView(
            queue.waiting,
            queue.waiting_prompt_tokens,
            queue.open_answers,
            queue.open_tokens,
            0 if self._known is None else self._known.seats,
        )

    def check(self, asked: QueuedRequest) -> None:
        """Raise RefusedError if ``asked`` would be refused now."""
        with self._counting(asked):
            self._queue.check(asked, time.monotonic())

    @contextmanager
    def _counting(self, asked: QueuedRequest) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self._metrics.refused.labels(asked.tenant, error.blame).inc()
            raise

    async def enter(self, asked: QueuedRequest) -> QueueEntry:
        """Wait until ``asked`` is let in.

        Raises RefusedError, at once if the wait would be too long, and RingError if the deadline of ``asked``
        passes.
        """
        with self._counting(asked):
            entry = self._queue.offer(asked, time.monotonic())
        self._admit()
        if entry.begun is None:
            await self._wait(entry)
        assert entry.begun is not None
        self._metrics.wait.observe(entry.begun - entry.since)
        return entry

    async def _wait(self, entry: QueueEntry) -> None:
        turn = self._turns[entry] = asyncio.get_running_loop().create_future()
        until = entry.since + GIVEN_UP * self._bounds.max_wait_s
        deadline = entry.asked.deadline
        # Decided here and not by the clock at the end: a timer may be a little early.
        by_deadline = deadline is not None and deadline <= until
        if deadline is not None:
            until = min(until, deadline)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await turn
        except TimeoutError:
            if entry.begun is None:  # else its turn came at the same moment
                raise self._expired(entry, by_deadline) from None
        except BaseException:
            if entry.begun is not None:  # let in at the same moment as it was cancelled
                self.leave(entry, 0, completed=False, ran=False)
            raise
        finally:
            del self._turns[entry]
            if entry.begun is None:
                self._queue.give_up(entry, time.monotonic())

    def _expired(self, entry: QueueEntry, by_deadline: bool) -> Exception:
        self._metrics.refused.labels(entry.asked.tenant, "timeout").inc()
        if by_deadline:
            return deadline_exceeded()
        return RefusedError("overall", "its turn did not come in time", self._retry_s())

    def _retry_s(self) -> float:
        rate = self._queue.pace.per_second(self._queue.open_requests)
        return 1.0 if rate is None else self._queue.waiting_tokens / rate / 4

    def leave(self, entry: QueueEntry, outputs: int, *, completed: bool, ran: bool = True) -> None:
        """Note that an open request is over. A request that never ``ran`` has used no tokens, not even its
        prompt's."""
        used = entry.asked.prompt_tokens + outputs if ran else 0
        self._queue.end(entry, outputs, completed, time.monotonic(), ran=ran)
        self._metrics.admitted_tokens.labels(entry.asked.tenant).inc(used)
        if self._queue.waiting:
            self._admit()

    def look(self) -> None:
        """Let in what there is room for now. Otherwise that is looked at when a request comes or ends, and
        every ``LOOK_S``."""
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


def retry_after(seconds: float) -> int:
    """Return whole seconds for a ``retry-after`` header, from 1 to 3600."""
    return max(1, min(3600, math.ceil(seconds)))
