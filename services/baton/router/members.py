"""The workers behind one router: those that discovery knows, and those that only finish what they have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from baton.connector.liveness import TICK_S
from baton.router.discovery.endpoint import Endpoint
from baton.router.outliers import Ejection, Outliers
from baton.router.workers import WorkerClient
from baton.supervision import Supervision
from baton.telemetry.discovery import EndpointView

log = logging.getLogger(__name__)

BEATS_AT_ONCE = 4
"""Heartbeats that go out in a row: each is a write to a socket of its own, for which tokens wait."""
SWEEP_S = 1.0
"""How often workers are compared with their like."""


class Members:
    """Dials those that come, drains those that go, and says whom a request may be given to.

    A worker that discovery no longer names gets nothing new from that moment on. Its stream stays until what
    is open there has ended, be it by itself or with the worker. Likewise one that is being ended, which
    discovery still names.
    """

    def __init__(
        self,
        make: Callable[[str], WorkerClient],
        outliers: Outliers | None = None,
        tasks: Supervision | None = None,
    ) -> None:
        """``make`` gives a client for an address, which is not dialled yet. ``tasks``: who looks after the
        clients' streams."""
        self.outliers = outliers or Outliers()
        self.ejections: Counter[str] = Counter()
        """So far, by reason."""
        self._make = make
        self._supervision = tasks or Supervision()
        self._endpoints: list[Endpoint] = []
        self._present: dict[tuple[str, str], WorkerClient] = {}
        """By address and uid."""
        self._leaving: list[WorkerClient] = []
        self._tasks: dict[WorkerClient, asyncio.Task[None]] = {}
        self._started = False
        self._since_sweep = 0.0

    @property
    def workers(self) -> list[WorkerClient]:
        """All that are known or have a stream that is needed, those known first."""
        return [*self._present.values(), *self._leaving]

    def endpoints(self) -> list[EndpointView]:
        """As discovery describes them."""
        return [
            EndpointView(
                role=self._role_of(endpoint),
                state="terminating" if endpoint.terminating else "ready" if endpoint.ready else "not_ready",
            )
            for endpoint in self._endpoints
        ]

    def _role_of(self, endpoint: Endpoint) -> str:
        """As it says itself: a worker may have another role than its pod was made for."""
        worker = self._present.get((endpoint.address, endpoint.uid))
        return worker.role if worker is not None and worker.ready else endpoint.role or "unknown"

    def start(self) -> None:
        """Dial those known, and from now on all that come."""
        self._started = True
        for worker in self._present.values():
            self._dial(worker)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def set(self, endpoints: Sequence[Endpoint]) -> None:
        """The workers that there are now. One with the address of another, and another uid, is new: the
        stream that is open there, if it still is, ends at a process that is gone."""
        self._endpoints = list(endpoints)
        named = {(each.address, each.uid): each for each in endpoints}
        for key in [key for key in self._present if key not in named]:
            self._retire(key)
        for key, endpoint in named.items():
            worker = self._present.get(key)
            if worker is None:
                if endpoint.terminating:  # nothing of ours is there, and nothing will be
                    continue
                name = f"{endpoint.address} ({endpoint.uid})" if endpoint.uid else endpoint.address
                worker = self._present[key] = self._returned(name) or self._come(endpoint.address, name)
            worker.admit(endpoint.admits)
        self._keep()

    def available(self, now: float) -> list[WorkerClient]:
        """Those that a request may be given to now.

        Where all that could do one half of the work are ejected, as can be when the others are lost, they are
        better than nobody.
        """
        # For each request, over all workers: what a report says is not asked for again.
        usable = [worker for worker in self._present.values() if worker.report().accepts]
        ejected = self.outliers.out(now)
        if not ejected:
            return usable
        good = [worker for worker in usable if worker.name not in ejected]
        if len(good) == len(usable):
            return good
        for prefills in (True, False):
            if not any((worker.role == "prefill") == prefills for worker in good):
                good += [worker for worker in usable if (worker.role == "prefill") == prefills]
        return good

    def unreported(self) -> dict[str, tuple[int, int]]:
        """By address, what is on its way to workers: for the other routers."""
        return {w.address: w.unreported for w in self._present.values() if any(w.unreported)}

    def note_elsewhere(self, reservations: Mapping[str, tuple[int, int]]) -> None:
        """What other routers have on their way."""
        for worker in self._present.values():
            worker.note_elsewhere(*reservations.get(worker.address, (0, 0)))

    def ejected(self, worker: WorkerClient) -> bool:
        return self.outliers.ejected(worker.name, time.monotonic())

    def tick(self, elapsed: float) -> None:
        """``elapsed`` seconds went by."""
        self._let_hear([worker for worker in self.workers if worker.tick(elapsed)])
        for worker in self._leaving:
            if worker.idle:
                self._tasks[worker].cancel()
        self._since_sweep += elapsed
        if self._since_sweep >= SWEEP_S:
            self._since_sweep = 0.0
            self._keep()
            for ejection in self.outliers.sweep(time.monotonic()):
                self._note(ejection)

    @staticmethod
    def _let_hear(due: Sequence[WorkerClient]) -> None:
        """Sends heartbeats, a few at a time, evenly over the time of a tick."""
        loop = asyncio.get_running_loop()
        for at, worker in enumerate(due):
            loop.call_later(TICK_S * (at - at % BEATS_AT_ONCE) / len(due), worker.beat)

    # --- what clients see of their workers (``baton.router.workers.Judge``)

    def failed(self, worker: WorkerClient) -> None:
        self._keep()
        ejection = self.outliers.failed(worker.name, time.monotonic())
        if ejection is not None:
            self._note(ejection)

    def succeeded(self, worker: WorkerClient) -> None:
        self.outliers.succeeded(worker.name)

    def took(self, worker: WorkerClient, seconds: float) -> None:
        self.outliers.took(worker.name, seconds)

    def _note(self, ejection: Ejection) -> None:
        self.ejections[ejection.reason] += 1
        log.warning(
            "worker %s gets no requests for %.0f s: %s", ejection.worker, ejection.seconds, ejection.told
        )

    def _returned(self, name: str) -> WorkerClient | None:
        """The one of that name that was leaving, if it still can stay: a second stream to the same process
        would end what is open on the first."""
        for worker in self._leaving:
            task = self._tasks[worker]
            if worker.name == name and not (task.cancelling() or task.done()):
                self._leaving.remove(worker)
                worker.retire(False)
                log.info("worker %s is known again", name)
                return worker
        return None

    def _come(self, address: str, name: str) -> WorkerClient:
        worker = self._make(address)
        worker.name = name
        if self._started:
            self._dial(worker)
        return worker

    def _keep(self) -> None:
        self.outliers.keep({w.name: w.role if w.ready else None for w in self._present.values()})

    def _dial(self, worker: WorkerClient) -> None:
        task = self._tasks[worker] = self._supervision.start("worker", worker.run, of=worker.address)
        task.add_done_callback(lambda _: self._forget(worker))

    def _retire(self, key: tuple[str, str]) -> None:
        worker = self._present.pop(key)
        log.info("worker %s is no longer known: it gets nothing new", worker.address)
        worker.retire()
        if worker not in self._tasks:
            return
        if worker.idle:
            self._tasks[worker].cancel()
        self._leaving.append(worker)

    def _forget(self, worker: WorkerClient) -> None:
        del self._tasks[worker]
        if worker in self._leaving:
            self._leaving.remove(worker)
