"""Deployments of two roles: pods that take time to start, that drain, and that may change role."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.planner.measured import Counts, MeasuredFleet, ServingRole
from baton.simulated.profile import Profile
from loadtest.planner.ring import Clock, DecodeWorker, PrefillWorker, Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a pod."""

    profile: Profile
    room: int
    """The tokens of KV of one worker."""
    ttft_s: float
    itl_s: float
    start_s: float
    drain_s: float
    """The time in which a drained worker's sequences may end; then they go on elsewhere."""
    turn_s: float
    """The time from the end of a drain to serving in the other role."""


@dataclass(eq=False, slots=True)
class Pod:
    home: ServingRole
    role: ServingRole
    born_at: float
    prefill: PrefillWorker | None = None
    decode: DecodeWorker | None = None
    ready: bool = False
    ending: bool = False
    """Whether the Deployment has let the pod go."""
    turning: bool = False
    gone_at: float | None = None


class Cluster:
    def __init__(self, clock: Clock, setting: Setting, first: Counts, seed: int) -> None:
        self.clock, self.setting = clock, setting
        self.ring = Ring(clock, setting.ttft_s, setting.itl_s)
        self.ring.on_leave = self._left
        self.replicas = first
        self.pods: list[Pod] = []
        self.scalings = self.switches = 0
        self._draw = random.Random(seed)
        self._gpu_seconds = 0.0
        self._retired: dict[DecodeWorker, Pod] = {}
        for role in ("prefill", "decode"):
            for _ in range(first.of(role)):
                self._serve(self._new(role))

    # --- for scalers to see

    def fleet(self) -> MeasuredFleet:
        ready = {"prefill": 0, "decode": 0}
        switching, strays = dict(ready), dict(ready)
        for pod in self.pods:
            if pod.ending:
                continue
            ready[pod.role] += pod.ready
            switching[pod.role] += pod.turning
            strays[pod.role] += pod.role != pod.home
        return MeasuredFleet(
            ready=Counts(**ready),
            switching=Counts(**switching),
            replicas=self.replicas,
            strays=Counts(**strays),
        )

    def prefills(self) -> Iterator[PrefillWorker]:
        """Yield the prefill workers, with ending ones as long as they run: Prometheus goes on to scrape
        them."""
        return (pod.prefill for pod in self.pods if pod.prefill is not None)

    def decodes(self) -> Iterator[DecodeWorker]:
        return (pod.decode for pod in self.pods if pod.decode is not None)

    @property
    def gpu_hours(self) -> float:
        now = self.clock.now
        return (self._gpu_seconds + sum(now - pod.born_at for pod in self.pods)) / 3600

    # --- for scalers to do

    def scale(self, role: ServingRole, replicas: int) -> None:
        before = self.replicas.of(role)
        if replicas == before:
            return
        self.scalings += 1
        self.replicas = self.replicas.plus(role, replicas - before)
        for _ in range(replicas - before):
            pod = self._new(role)
            self.clock.at(self.clock.now + self.setting.start_s, lambda pod=pod: self._started(pod))  # type: ignore[misc]
        for _ in range(before - replicas):
            self._end_one(role)

    def _end_one(self, home: ServingRole) -> None:
        """End a pod as a ReplicaSet chooses it: a pod that is not ready yet, or any."""
        of = [pod for pod in self.pods if pod.home == home and not pod.ending]
        unready = [pod for pod in of if not pod.ready]
        pod = unready[-1] if unready else self._draw.choice(of)
        pod.ending = True
        if pod.turning:
            return  # the pod ends when it has turned
        if pod.ready:
            self._drain(pod)
        else:
            self._gone(pod)

    def switch(self, to: ServingRole, count: int) -> None:
        """Switch the least loaded pods to a role."""
        able = [pod for pod in self.pods if pod.role != to and pod.ready and not pod.ending]
        able.sort(key=lambda pod: (pod.home != to, _load(pod)))
        for pod in able[:count]:
            self.switches += 1
            pod.turning, pod.role = True, to
            self._drain(pod)

    # --- pods

    def _new(self, role: ServingRole) -> Pod:
        pod = Pod(role, role, self.clock.now)
        self.pods.append(pod)
        return pod

    def _started(self, pod: Pod) -> None:
        if not pod.ending:
            self._serve(pod)

    def _serve(self, pod: Pod) -> None:
        setting, ring = self.setting, self.ring
        if pod.role == "prefill":
            pod.prefill = PrefillWorker(self.clock, setting.profile)
            ring.prefills.append(pod.prefill)
        else:
            pod.decode = DecodeWorker(self.clock, setting.profile, setting.room, setting.itl_s)
            ring.decodes.append(pod.decode)
        pod.ready = True
        ring.place()

    def _drain(self, pod: Pod) -> None:
        """Drain a pod: it gets no new requests, and is done when it is empty or its time is over."""
        pod.ready = False
        if pod.prefill is not None:
            self.ring.prefills.remove(pod.prefill)
            ends = max(self.clock.now, pod.prefill.free_at)
            self.clock.at(ends, lambda: self._drained(pod))
        else:
            assert pod.decode is not None
            self.ring.decodes.remove(pod.decode)
            self._retired[pod.decode] = pod
            self.clock.at(self.clock.now + self.setting.drain_s, lambda: self._out_of_time(pod))
            self._left(pod.decode)

    def _left(self, decode: DecodeWorker) -> None:
        pod = self._retired.get(decode)
        if pod is not None and decode.empty:
            del self._retired[decode]
            self._drained(pod)

    def _out_of_time(self, pod: Pod) -> None:
        if pod.decode in self._retired:
            assert pod.decode is not None
            self.ring.move(pod.decode)
            self._left(pod.decode)
            if pod.decode in self._retired:  # a request is still on its way here from prefill
                self.clock.at(self.clock.now + 1.0, lambda: self._out_of_time(pod))

    def _drained(self, pod: Pod) -> None:
        pod.prefill = pod.decode = None
        if pod.turning:
            self.clock.at(self.clock.now + self.setting.turn_s, lambda: self._turned(pod))
        else:
            self._gone(pod)

    def _turned(self, pod: Pod) -> None:
        pod.turning = False
        if pod.ending:
            self._gone(pod)
        else:
            self._serve(pod)

    def _gone(self, pod: Pod) -> None:
        pod.gone_at = self.clock.now
        self._gpu_seconds += self.clock.now - pod.born_at
        self.pods.remove(pod)


def _load(pod: Pod) -> float:
    if pod.prefill is not None:
        return pod.prefill.backlog_s
    assert pod.decode is not None
    return pod.decode.room - pod.decode.spare
