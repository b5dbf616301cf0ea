"""Streams whose work runs later than the host issued it, and events.

Nothing runs when it is issued. It runs when somebody waits for it, in one of several orders that a device
might choose; each of them keeps what streams and events promise, and nothing else:

- ``late``: nothing runs before the host waits for it, and then only that stream, and what it waits for.
- ``others_first``: everything that other streams may do first, they do first.
- ``early``: everything runs when it is issued, as if the device were infinitely fast.
- ``random``: a random choice, from a seed.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, Protocol

import torch

Order = Literal["late", "others_first", "early", "random"]
Kind = Literal["operation", "kernel", "copy", "garbage", "mark", "replay"]


class Work:
    """A piece of work of a stream. It runs after everything issued to the stream before, and after
    ``after``."""

    __slots__ = ("after", "captured", "done", "kind", "name", "queue", "run", "seconds", "when")

    def __init__(
        self, queue: Queue, kind: Kind, name: str, run: Callable[[], object] | None, after: Work | None = None
    ) -> None:
        self.queue = queue
        self.kind = kind
        self.name = name
        self.run = run
        self.after = after
        self.seconds = 0.0
        """The time that it takes, on a device that takes time."""
        self.done = False
        self.captured = False
        """Whether it belongs to a graph: it never runs by itself then."""
        self.when = 0.0
        """When it was done."""


class Queue:
    """The work of one stream that has not run. ``capture``: where work is recorded instead."""

    def __init__(self, device: int, number: int) -> None:
        self.device = device
        self.number = number
        self.work: deque[Work] = deque()
        self.last: Work | None = None
        """The work that was issued last."""
        self.capture: Capture | None = None
        self.busy_until = 0.0


class Capture:
    """What is recorded of one graph."""

    def __init__(self, mode: str, pool: tuple[int, int]) -> None:
        self.mode = mode
        self.pool = pool
        """The memory that it allocates from."""
        self.work: list[Work] = []
        self.thread = threading.get_ident()
        self.queues: list[Queue] = []
        self.broken = ""
        """Why nothing can be made of it."""


class Scheduler(Protocol):
    """What decides when work runs."""

    error: BaseException | None
    """What went wrong on the device. It works no more then."""

    def issue(self, work: Work) -> None:
        """Take work that its queue now has."""

    def finish(self, work: Work) -> None:
        """Return when this work has run."""

    def poll(self, work: Work) -> bool:
        """Whether this work has run."""

    def close(self) -> None: ...


class LateScheduler:
    """Runs work when the host waits for it, in the thread that waits."""

    def __init__(self, queues: list[Queue], order: Order, seed: int) -> None:
        self.error: BaseException | None = None
        self._queues = queues
        self._order = order
        self._random = random.Random(seed)
        self._running = threading.RLock()

    def issue(self, work: Work) -> None:
        if self._order == "early" or (self._order == "random" and self._random.random() < 0.1):
            self.finish(work)

    def finish(self, work: Work) -> None:
        with self._running:
            if self._order == "others_first":
                self._run_others(work)
            elif self._order == "random":
                self._run_some()
            self._run_until(work)

    def poll(self, work: Work) -> bool:
        """One piece of work further than at the last time of asking."""
        with self._running:
            done = work.done
            if not done:
                self._step(work.queue)
            return done

    def close(self) -> None:
        pass

    def _run_others(self, work: Work) -> None:
        for queue in list(self._queues):
            if queue is not work.queue and queue.last is not None:
                self._run_until(queue.last)

    def _run_some(self) -> None:
        for _ in range(self._random.randrange(20)):
            self._step(self._random.choice(self._queues))

    def _run_until(self, work: Work) -> None:
        while not work.done:
            if not work.queue.work:
                raise RuntimeError(f"{work.kind} {work.name} was never issued, or is just running")
            self._step(work.queue)

    def _step(self, queue: Queue) -> None:
        """Run the next work of a queue, and whatever that waits for."""
        if not queue.work:
            return
        work = queue.work[0]
        if work.after is not None:
            self._run_until(work.after)
        queue.work.popleft()
        error = run(work)
        self.error = self.error or error


class TimedScheduler:
    """Runs work in a thread of its own, side by side on all streams, while the host goes on; work takes the
    time that it says it takes."""

    def __init__(self, queues: list[Queue]) -> None:
        self.error: BaseException | None = None
        self._queues = queues
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="fake device", daemon=True)
        self._thread.start()

    def issue(self, work: Work) -> None:
        with self._changed:
            self._changed.notify_all()

    def finish(self, work: Work) -> None:
        with self._changed:
            while not work.done:
                self._changed.wait()

    def poll(self, work: Work) -> bool:
        return work.done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _main(self) -> None:
        while True:
            with self._changed:
                while (work := self._ready()) is None:
                    if self._closed:
                        return
                    self._changed.wait(self._patience())
            error = run(work)
            with self._changed:
                self.error = self.error or error
                work.queue.work.popleft()
                self._changed.notify_all()

    def _ready(self) -> Work | None:
        now = time.monotonic()
        for queue in self._queues:
            if not queue.work or queue.busy_until > now:
                continue
            work = queue.work[0]
            if work.after is not None and not work.after.done:
                continue
            if work.seconds:
                queue.busy_until, work.seconds = now + work.seconds, 0.0
                continue
            return work
        return None

    def _patience(self) -> float | None:
        now = time.monotonic()
        left = [queue.busy_until - now for queue in self._queues if queue.busy_until > now]
        return min(left, default=None)


def run(work: Work) -> BaseException | None:
    """Run one piece of work. Returns what went wrong."""
    error: BaseException | None = None
    if work.run is not None:
        try:
            with torch.inference_mode():
                work.run()
        except Exception as failure:  # noqa: BLE001 (the host hears of it when it waits)
            error = failure
    work.run = None
    work.when = time.perf_counter()
    work.done = True
    return error


class Timeline:
    """All streams of all devices: what the host issues, and what it waits for."""

    def __init__(self, order: Order, seed: int, timed: bool) -> None:
        self.queues: list[Queue] = []
        self._scheduler: Scheduler = (
            TimedScheduler(self.queues) if timed else LateScheduler(self.queues, order, seed)
        )
        self.captures: list[Capture] = []
        self.issued: Counter[str] = Counter()
        """What was launched, by kind and name. What a graph replays is not counted by itself."""
        self.waits: Counter[str] = Counter()
        """How often the host waited, by what for."""
        self.hollow = False
        """Whether only copies do anything."""
        self._numbers = itertools.count()
        self._issuing = threading.RLock()
        """Held while a stream's last work changes: several threads may issue to one stream."""

    def new_queue(self, device: int) -> Queue:
        queue = Queue(device, next(self._numbers))
        self.queues.append(queue)
        return queue

    def issue(
        self,
        queue: Queue,
        kind: Kind,
        name: str,
        run: Callable[[], object] | None,
        after: Work | None = None,
        seconds: float = 0.0,
    ) -> Work:
        """Give a stream work, or record it if the stream is being captured."""
        if self.hollow and kind in ("operation", "kernel"):
            run = None
        work = Work(queue, kind, name, run, after)
        work.seconds = seconds
        if queue.capture is not None:
            work.captured = True
            queue.capture.work.append(work)
            return work
        self.check()
        self.issued[kind] += 1
        self.issued[f"{kind} {name}"] += 1
        with self._issuing:
            queue.work.append(work)
            queue.last = work
        self._scheduler.issue(work)
        return work

    def mark(self, queue: Queue) -> Work:
        return self.issue(queue, "mark", "", None)

    def finish(self, work: Work, reason: str) -> None:
        """Let the host wait. RuntimeError if the device has failed, or if nobody may wait as a graph is being
        captured."""
        self.forbid_in_capture(work.queue, reason)
        if work.captured:
            raise cuda_error("event recorded in a capture: dependency created on uncaptured work", reason)
        self.waits[reason] += 1
        self._scheduler.finish(work)
        self.check()

    def finish_queue(self, queue: Queue, reason: str) -> None:
        self.forbid_in_capture(queue, reason)
        if queue.last is None:
            self.waits[reason] += 1
        else:
            self.finish(queue.last, reason)

    def finish_device(self, device: int | None, reason: str) -> None:
        """Wait for all streams of a device; None: of all devices."""
        for queue in list(self.queues):
            if device in (None, queue.device):
                self.finish_queue(queue, reason)

    def poll(self, work: Work, reason: str) -> bool:
        self.forbid_in_capture(work.queue, reason)
        self.check()
        return self._scheduler.poll(work)

    def check(self) -> None:
        """RuntimeError if the device has failed: for ever, as on the real one."""
        if self._scheduler.error is not None:
            raise torch.AcceleratorError(
                "CUDA error: device-side assert triggered"
            ) from self._scheduler.error

    def forbid_in_capture(self, queue: Queue, reason: str) -> None:
        """RuntimeError for what must not happen while a graph is being captured, which it breaks."""
        here = threading.get_ident()
        for capture in self.captures:
            if (
                queue.capture is capture
                or capture.mode == "global"
                or (capture.mode == "thread_local" and capture.thread == here)
            ):
                capture.broken = reason
                raise cuda_error("operation not permitted when stream is capturing", reason)

    def abandon(self) -> None:
        """Let go of work that nobody has waited for, and of the memory that it uses."""
        for queue in self.queues:
            while queue.work:
                work = queue.work.popleft()
                work.run, work.done = None, True

    def close(self) -> None:
        self._scheduler.close()


def cuda_error(message: str, reason: str = "") -> RuntimeError:
    return torch.AcceleratorError(f"CUDA error: {message}" + (f" ({reason})" if reason else ""))
