"""Random lives of a cluster and of its API server, and whether a router's view of it keeps up.

A script changes pods (they come, become ready and unready, are ended and deleted, are replaced at the same
address, move between slices) while the API server drops, stalls, forgets, repeats, refuses and loses events.
For each pod it is watched, all the time, that the router gives requests to it if and only if it may; each
change may take ``BOUND_S`` to arrive. The server keeps one promise: at most two lists in a row fail.

The clocks of server and client run ``factor`` times faster than ours, so that a script takes less time; the
bound shrinks with it, and the time during which this process itself was kept from running is added.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.router.discovery.pace import WatchTimings
from baton.router.fleet.members import Members
from baton.router.fleet.worker_client import WorkerClient
from baton.telemetry.discovery import DiscoveryCounts
from baton.v1 import worker_pb2 as pb
from tests.support.fake_kubernetes import PORT_NAME, FakeKubernetes, ListFault, WatchFault, pod, serving

BOUND_S = 5.0
LOOK_S = 0.004
"""How often the views are compared, by our clock."""
MAX_PODS = 12
LIST_FAULTS: tuple[ListFault, ...] = ("500", "504", "410", "429", "stall", "drop", "malformed")
WATCH_FAULTS: tuple[WatchFault, ...] = ("410", "410 event", "500", "stall", "drop", "malformed", "early")


class Nobody:
    """Watches a worker that is never dialled."""

    def on_ready(self, worker: WorkerClient) -> None: ...

    def on_change(self, worker: WorkerClient) -> None: ...

    def on_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        return True

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None: ...

    def on_lost(self, worker: WorkerClient) -> None: ...

    def busy(self, worker: WorkerClient) -> bool:
        return False


def greeted(address: str) -> WorkerClient:
    """A worker whose stream is up: the word of the API server alone decides."""
    worker = WorkerClient(address, "scripts", Nobody())
    worker.hello = pb.WorkerHello(role=pb.ROLE_BOTH)
    return worker


@dataclass(slots=True)
class Pod:
    address: str
    uid: str
    slice: str
    ready: bool | None = True
    terminating: bool = False

    @property
    def admits(self) -> bool:
        return self.ready is not False and not self.terminating


@dataclass(slots=True)
class Outcome:
    """Of one script. Times are by the server's clock, in seconds."""

    seed: int
    changes: int = 0
    faults: int = 0
    lists: int = 0
    slowest_s: float = 0.0
    """The longest that a view was wrong, less what we were kept from running."""
    starved_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Script:
    """One random life."""

    def __init__(self, seed: int, factor: float) -> None:
        self.outcome = Outcome(seed)
        self._rng = random.Random(seed)
        self._server = FakeKubernetes(factor)
        self._factor = factor
        # Some lives are quiet but for one kind of fault, and in others everything happens at once.
        self._mean_s = self._rng.choice((0.15, 0.5, 3.0))
        self._fault_rate = self._rng.choice((0.15, 0.4, 0.8))
        kinds = self._rng.randint(1, len(self._all_faults()))
        self._faults = self._rng.sample(self._all_faults(), kinds)
        self._pods: dict[str, Pod] = {}
        """By uid."""
        self._born = 0
        self._members = Members(greeted)
        self._wrong_since: dict[str, float] = {}
        """Pods that the router sees otherwise than they are: since when, our clock."""
        self._starved: dict[str, float] = {}
        self._changed_at: dict[str, float] = {}

    async def run(self, seconds: float) -> Outcome:
        """A life of ``seconds``, and then quiet for as long as it takes to be all right."""
        server = self._server
        async with serving(server):
            counts = DiscoveryCounts(CollectorRegistry())
            discovery = KubernetesDiscovery(
                server.api(), PORT_NAME, counts, WatchTimings().faster(self._factor)
            )
            tasks = [
                asyncio.create_task(discovery.run(self._members.set)),
                asyncio.create_task(self._look()),
            ]
            end = time.monotonic() + seconds / self._factor
            while time.monotonic() < end:
                self._step()
                await asyncio.sleep(self._rng.expovariate(1 / self._mean_s) / self._factor)
            await asyncio.sleep(BOUND_S / self._factor)
            if self._wrong_since:
                await asyncio.sleep(BOUND_S / self._factor)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self.outcome.lists = server.lists
        return self.outcome

    # --- what happens

    def _step(self) -> None:
        rng = self._rng
        if rng.random() < self._fault_rate:
            self.outcome.faults += 1
            rng.choice(self._faults)()
        changes = (self._come, self._turn, self._end, self._delete, self._replace, self._move, self._wipe)
        rng.choices(changes, (5, 3, 2, 4, 1, 1, 0.3))[0]()

    def _all_faults(self) -> list[Callable[[], object]]:
        rng, server = self._rng, self._server
        return [
            server.drop,
            server.stall,
            server.compact,
            server.repeat,
            lambda: setattr(server, "losing", rng.randint(1, 3)),
            lambda: server.list_faults.extend(rng.choices(LIST_FAULTS, k=rng.randint(1, 2))),
            lambda: server.list_faults.extend(["stall", "stall"]),
            lambda: server.watch_faults.extend(rng.choices(WATCH_FAULTS, k=rng.randint(1, 3))),
            lambda: server.watch_faults.extend(["stall"] * 3),
        ]

    def _some(self) -> Pod | None:
        return self._rng.choice(list(self._pods.values())) if self._pods else None

    def _put(self, name: str) -> None:
        self.outcome.changes += 1
        self._server.put(
            name,
            [
                pod(p.address, p.uid, ready=p.ready, serving=p.ready, terminating=p.terminating or None)
                for p in self._pods.values()
                if p.slice == name
            ],
        )

    def _come(self, address: str | None = None) -> None:
        if len(self._pods) >= MAX_PODS:
            return
        self._born += 1
        uid = f"pod-{self._born}"
        name = self._rng.choice(("a", "b", "c"))
        ready = self._rng.choice((True, True, None, False))
        self._pods[uid] = Pod(address or f"10.0.0.{self._born}", uid, name, ready)
        self._put(name)

    def _turn(self) -> None:
        if one := self._some():
            one.ready = self._rng.choice((True, False, None))
            self._put(one.slice)

    def _end(self) -> None:
        if one := self._some():
            one.terminating = True
            self._put(one.slice)

    def _delete(self) -> None:
        if one := self._some():
            del self._pods[one.uid]
            self._put(one.slice)

    def _replace(self) -> None:
        """Its address goes to another pod, at once."""
        if one := self._some():
            self._delete_one(one)
            self._come(one.address)

    def _delete_one(self, one: Pod) -> None:
        del self._pods[one.uid]
        self._put(one.slice)

    def _move(self) -> None:
        """To another slice; in between it is in both."""
        if one := self._some():
            before, one.slice = one.slice, self._rng.choice(("a", "b", "c"))
            self._put(one.slice)
            if before != one.slice:
                self._put(before)

    def _wipe(self) -> None:
        """A slice goes, as with its Service."""
        if self._server.slices:
            name = self._rng.choice(sorted(self._server.slices))
            for one in [p for p in self._pods.values() if p.slice == name]:
                del self._pods[one.uid]
            self.outcome.changes += 1
            self._server.delete(name)

    # --- what the router makes of it

    async def _look(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            starved = max(0.0, now - before - 1.5 * LOOK_S)
            self.outcome.starved_s += starved * self._factor
            before = now
            self._compare(now, starved)

    def _compare(self, now: float, starved: float) -> None:
        """Whatever is wrong now is so since the pod changed last, or since it was seen wrong first."""
        truth = {p.uid for p in self._pods.values() if p.admits}
        view = {worker.name.partition("(")[2].rstrip(")") for worker in self._members.available(now)}
        for uid in [uid for uid in self._wrong_since if (uid in truth) == (uid in view)]:
            del self._wrong_since[uid], self._starved[uid]
        for uid in truth ^ view:
            since = self._wrong_since.setdefault(uid, now)
            self._starved[uid] = self._starved.get(uid, 0.0) + starved
            wrong_s = (now - since - self._starved[uid]) * self._factor
            self.outcome.slowest_s = max(self.outcome.slowest_s, wrong_s)
            if wrong_s > BOUND_S:
                kind = "given requests" if uid in view else "kept from requests"
                self.outcome.wrong.append(f"{uid} is {kind} {wrong_s:.1f} s after it changed")
                self._wrong_since[uid] = now
                self._starved[uid] = 0.0


async def run_scripts(
    seeds: range, factor: float, seconds: float, at_once: int, done: Callable[[Outcome], object]
) -> list[Outcome]:
    """The outcome of each script, some of them at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(seed: int) -> Outcome:
        async with gate:
            outcome = await Script(seed, factor).run(seconds)
            done(outcome)
            return outcome

    return await asyncio.gather(*(one(seed) for seed in seeds))
