"""The workers behind one router: those that discovery knows, and former ones that finish their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from baton.net.heartbeat import TICK_S
from baton.router.discovery.endpoint import Endpoint
from baton.router.fleet.outliers import Ejection, Outliers
from baton.router.fleet.worker_client import WorkerClient
from baton.telemetry.discovery import EndpointView
from baton.telemetry.supervision import Supervision

log = logging.getLogger(__name__)

BEATS_AT_ONCE = 4
"""Heartbeats that are sent in a row: each is a write to another socket, for which tokens wait."""
SWEEP_S = 1.0
"""The period at which workers are compared with others of their role, in seconds."""


class Members:
    """Dials workers that come, drains workers that go, and says which of them may get requests.

    A worker that discovery no longer names, or names as terminating, gets no new requests from that moment
    on. Its stream stays until its open requests have ended, by themselves or with the worker.
    """

    def __init__(
        self,
        make: Callable[[str], WorkerClient],
        outliers: Outliers | None = None,
        tasks: Supervision | None = None,
    ) -> None:
        """``make`` returns a client for an address, which is not dialled yet. ``tasks``: the supervision of
        the clients' streams."""
        self.outliers = outliers or Outliers()
        self.ejections: Counter[str] = Counter()
        """Ejections so far, by reason."""
        self._make = make
        self._supervision = tasks or Supervision()
        self._endpoints: list[Endpoint] = []
        self._present: dict[tuple[str, str], WorkerClient] = {}
        """The workers that discovery knows, by address and uid."""
        self._leaving: list[WorkerClient] = []
        self._tasks: dict[WorkerClient, asyncio.Task[None]] = {}
        self._started = False
        self._since_sweep = 0.0

    @property
    def workers(self) -> list[WorkerClient]:
        """The workers that discovery knows, then former ones whose stream is still needed."""
        return [*self._present.values(), *self._leaving]

    def endpoints(self) -> list[EndpointView]:
        """Return the workers as discovery describes them."""
        return [
            EndpointView(
                role=self._role_of(endpoint),
                state="terminating" if endpoint.terminating else "ready" if endpoint.ready else "not_ready",
            )
            for endpoint in self._endpoints
        ]

    def _role_of(self, endpoint: Endpoint) -> str:
        """Return the role that the worker itself tells: it may have another one than its pod was made for."""
        worker = self._present.get((endpoint.address, endpoint.uid))
        return worker.role if worker is not None and worker.ready else endpoint.role or "unknown"

    def start(self) -> None:
        """Dial the known workers, and from now on every new one."""
        self._started = True
        for worker in self._present.values():
            self._dial(worker)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def set(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the list of workers. A known address with another uid is a new worker: a stream that is
        still open at this address leads to a process that is gone."""
        self._endpoints = list(endpoints)
        named = {(each.address, each.uid): each for each in endpoints}
        for key in [key for key in self._present if key not in named]:
            self._retire(key)
        for key, endpoint in named.items():
            worker = self._present.get(key)
            if worker is None:
                if endpoint.terminating:  # it has no requests of this router, and gets none
                    continue
                name = f"{endpoint.address} ({endpoint.uid})" if endpoint.uid else endpoint.address
                worker = self._present[key] = self._returned(name) or self._come(endpoint.address, name)
            worker.admit(endpoint.admits)
        self._keep()

    def available(self, now: float) -> list[WorkerClient]:
        """Return the workers that a request may be given to now.

        If all workers that prefill, or all that decode, are ejected, as can be when the others are lost, the
        ejected ones are better than none.
        """
        # Each request loops over all workers here: ask for no fact that the report has already.
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
        """Return the unreported load by address, sequences and prompt tokens, for the other routers."""
        return {w.address: w.unreported for w in self._present.values() if any(w.unreported)}

    def note_elsewhere(self, reservations: Mapping[str, tuple[int, int]]) -> None:
        """Note the load, sequences and prompt tokens, that other routers have on its way to each address."""
        for worker in self._present.values():
            worker.note_elsewhere(*reservations.get(worker.address, (0, 0)))

    def ejected(self, worker: WorkerClient) -> bool:
        return self.outliers.ejected(worker.name, time.monotonic())

    def tick(self, elapsed: float) -> None:
        """Advance the timers by ``elapsed`` seconds."""
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
        """Send heartbeats, a few at a time, evenly over the time of a tick."""
        loop = asyncio.get_running_loop()
        for at, worker in enumerate(due):
            loop.call_later(TICK_S * (at - at % BEATS_AT_ONCE) / len(due), worker.beat)

    # --- the judge of the workers (``baton.router.fleet.worker_client.Judge``)

    def failed(self, worker: WorkerClient) -> None:
        self._keep()
        ejection = self.outliers.failed(worker.name, time.monotonic())
        if ejection is not None:
            self._note(ejection)

    def _note(self, ejection: Ejection) -> None:
        self.ejections[ejection.reason] += 1
        log.warning(
            "worker %s gets no requests for %.0f s: %s", ejection.worker, ejection.seconds, ejection.told
        )

    def _returned(self, name: str) -> WorkerClient | None:
        """Return the leaving worker of that name to the list, if it can still stay: a second stream to the
        same process would end the requests on the first."""
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
