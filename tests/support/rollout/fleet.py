"""Deployments of prefill and decode workers, and who rolls them out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.chart import Object, of_kind
from tests.support.kubelet import Cluster, Pod
from tests.support.release import ROUTER
from tests.support.rollout.deployment import Member, Strategy

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Release:
    """What is applied at a time."""

    revision: str
    objects: Sequence[Object]

    def deployment(self, role: str) -> Object:
        return of_kind(self.objects, "Deployment")[f"test-baton-{role}"]


@dataclass(eq=False, slots=True)
class Controlled:
    """A pod of a Deployment."""

    pod: Pod
    revision: str
    deleted: asyncio.Task[float] | None = None


@dataclass(eq=False)
class Deployment:
    """One, and its controller, which looks at it every now and then."""

    role: str
    cluster: Cluster
    wanted: Release
    rng: random.Random
    sync_s: float
    """The longest time between two looks."""
    pods: list[Controlled] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await self._sync()
            await asyncio.sleep(self.rng.uniform(0.2, 1) * self.sync_s)

    def apply(self, release: Release) -> None:
        self.wanted = release

    @property
    def strategy(self) -> Strategy:
        return Strategy.of(self.wanted.deployment(self.role))

    @property
    def live(self) -> list[Controlled]:
        """Those that do not terminate."""
        return [each for each in self.pods if each.deleted is None]

    @property
    def rolled(self) -> bool:
        """Every pod is of what is wanted, and ready. Old ones may still end."""
        live = self.live
        right = [each for each in live if each.revision == self.wanted.revision and each.pod.ready]
        return len(live) == len(right) == self.strategy.replicas

    @property
    def available(self) -> int:
        return sum(each.pod.ready for each in self.live)

    async def _sync(self) -> None:
        by_name = {each.pod.name: each for each in self.live}
        members = [
            Member(name, each.revision == self.wanted.revision, each.pod.ready)
            for name, each in by_name.items()
        ]
        step = self.strategy.next(members)
        for name in step.delete:
            by_name[name].deleted = asyncio.create_task(by_name[name].pod.delete())
        for _ in range(step.create):
            wanted = self.wanted
            template = wanted.deployment(self.role)["spec"]["template"]
            pod = await self.cluster.start(f"test-baton-{self.role}", template)
            self.pods.append(Controlled(pod, wanted.revision))


class Fleet:
    """Routers, and both Deployments."""

    def __init__(
        self, cluster: Cluster, release: Release, rng: random.Random, sync_s: float, routers: int
    ) -> None:
        self.cluster = cluster
        self.routers: list[Pod] = []
        self._num_routers = routers
        self.deployments: Mapping[str, Deployment] = {
            role: Deployment(role, cluster, release, rng, sync_s) for role in ROLES
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._tasks = [asyncio.create_task(each.run()) for each in self.deployments.values()]
        self.routers = [await self.cluster.start(ROUTER) for _ in range(self._num_routers)]
        await self.until_rolled(300.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def until_rolled(self, seconds: float) -> None:
        """Until all pods are of what is wanted, routers are ready, and old pods are gone. TimeoutError."""
        async with asyncio.timeout(seconds):
            while not all(each.rolled for each in self.deployments.values()) or not all(
                router.ready for router in self.routers
            ):
                self._look()
                await asyncio.sleep(0.05)
            await self.until_gone()

    async def until_gone(self) -> None:
        """Until nothing terminates."""
        leaving = [each.deleted for each in self.workers if each.deleted is not None]
        await asyncio.gather(*leaving)

    def _look(self) -> None:
        """A controller that has failed fails us."""
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def workers(self) -> list[Controlled]:
        """All that there have been."""
        return [each for deployment in self.deployments.values() for each in deployment.pods]

    def ended_badly(self) -> list[str]:
        """Pods that were ready once, and did not end in order after they were deleted; such that ended by
        themselves, and such that seemed dead."""
        found = [
            f"{router.name} ended with {router.process.returncode}"
            for router in self.routers
            if router.process.returncode is not None
        ]
        for each in self.workers:
            status = each.pod.process.returncode
            served = "readiness passed" in each.pod.events
            if each.deleted is None and status is not None:
                found.append(f"{each.pod.name} ended by itself with {status}")
            elif each.deleted is not None and served and status != 0:
                found.append(f"{each.pod.name} ended with {status}: {each.pod.events}")
            if "liveness failed" in each.pod.events:
                found.append(f"{each.pod.name} seemed dead: {each.pod.events}")
        return found
