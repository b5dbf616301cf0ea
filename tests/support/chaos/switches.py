"""Workers change their roles under requests of all kinds, and no client may notice more than a pause.

What answers must be is known as in ``tests.support.chaos.streams``, whose load and judgement this is.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.role import ROLES, Role
from baton.greeting.cluster_key import ClusterKeys
from baton.planner.switch_role import SwitchError, switch_role
from baton.process.ready import WorkerReady
from tests.support.chaos.streams import (
    DECODE_OPTIONS,
    PREFILL_OPTIONS,
    ROUTER_OPTIONS,
    Plan,
    Report,
    Streams,
    asks,
    made,
    worker_options,
)
from tests.support.ring import CLUSTER_KEY, Ring, Service, running_ring, scrape, worker
from tests.support.rings_at_their_limit import errors_logged

MOVING = "moving"
"""Instead of the role of a worker that changes it."""
SHORT_S = 0.05
"""A timeout that answers under way do not keep to: they are cut off."""
SERVES_WITHIN_S = 30.0


@dataclass
class Switches:
    """What was done."""

    seconds: list[float] = field(default_factory=list)
    """From the request until the worker served in its new role."""
    cut_seconds: list[float] = field(default_factory=list)
    """Of those with a timeout that was too short for what was open."""
    ready_seconds: list[float] = field(default_factory=list)
    """From the request until the router had the new greeting."""
    start_seconds: list[float] = field(default_factory=list)
    """What a new process takes instead, until it is ready."""


class SwitchedStreams(Streams):
    """Load on a ring whose workers take other roles at random moments."""

    def __init__(self, ring: Ring, rng: random.Random, clients: int, report: Report) -> None:
        super().__init__(ring, rng, clients, report)
        self.done = Switches()
        self._roles = {
            member.name: member.ready.role for member in ring.workers if isinstance(member.ready, WorkerReady)
        }

    async def _disturb(self, events: int) -> None:
        while sum(self.report.events.values()) < events and time.monotonic() <= self._until:
            await asyncio.sleep(self._rng.uniform(0.2, 1.0))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._rng.choice((1, 1, 2))):  # two at once, if others can do without both
                    if (pair := self._draw()) is not None:
                        tasks.create_task(self._switch(*pair))
                        await asyncio.sleep(0)  # it counts as moving now

    def _draw(self) -> tuple[Service, Role] | None:
        """A worker and its next role, such that one can decode and one can prefill throughout."""
        member = self._rng.choice([each for each in self._ring.workers if self._roles[each.name] != MOVING])
        role = self._rng.choice([each for each in ROLES if each != self._roles[member.name]])
        staying = [other for name, other in self._roles.items() if name != member.name and other != MOVING]
        if not any(each != "prefill" for each in staying) or not any(each != "decode" for each in staying):
            return None
        return member, role

    async def _switch(self, member: Service, role: Role) -> None:
        assert isinstance(member.ready, WorkerReady)
        was, self._roles[member.name] = self._roles[member.name], MOVING
        hurried = self._rng.random() < 0.25
        timeout_s = SHORT_S if hurried else 0.0
        began = time.monotonic()
        try:
            keys = ClusterKeys(CLUSTER_KEY.encode())
            done = await switch_role(member.ready.address, role, keys, timeout_s=timeout_s)
        except SwitchError as error:
            self.report.violations.append(f"{member.name}, {was}, to {role}: {error}")
            self._roles[member.name] = was
            return
        self.report.events[f"{done.was} to {done.now}"] += 1
        cut = hurried and done.seconds > SHORT_S
        (self.done.cut_seconds if cut else self.done.seconds).append(done.seconds)
        await self._until_the_router_knows(member.ready.address, role)
        self.done.ready_seconds.append(time.monotonic() - began)
        self._roles[member.name] = role

    async def _until_the_router_knows(self, address: str, role: str) -> None:
        async with asyncio.timeout(SERVES_WITHIN_S):
            while True:
                samples = await asyncio.to_thread(scrape, f"{self._ring.url}/metrics")
                known = (name for name, up in samples.items() if up and "worker_ready{" in name)
                if any(f'"{address}"' in name and f'"{role}"' in name for name in known):
                    return
                await asyncio.sleep(0.02)


def run(tmp: Path, plan: Plan, starts: int = 3) -> tuple[Report, Switches]:
    """Start a ring of two workers of each role, with its logs in ``tmp``, and carry the plan out. Then time
    so many fresh ``starts`` of a worker beside it, when it is idle."""
    rng = random.Random(plan.seed)
    model = made(tmp, plan.model)
    asked = asks(rng, plan.questions, plan.longest, model)
    with running_ring(
        tmp,
        model=model,
        prefill=2,
        decode=2,
        options=worker_options(model),
        prefill_options=PREFILL_OPTIONS,
        decode_options=DECODE_OPTIONS,
        router_options=ROUTER_OPTIONS,
    ) as ring:
        streams = SwitchedStreams(ring, rng, plan.clients, Report(plan.seed, plan.model))
        report = asyncio.run(streams.run(asked, plan))
        report.violations += errors_logged(ring)
        streams.done.start_seconds = [_start(tmp, f"fresh-{n}", model) for n in range(starts)]
    return report, streams.done


def _start(tmp: Path, name: str, model: str) -> float:
    """Seconds until a new decode worker is ready."""
    fresh = worker(tmp, name, "decode", model, *worker_options(model), *DECODE_OPTIONS)
    began = time.monotonic()
    fresh.start()
    try:
        fresh.wait_ready()
        return time.monotonic() - began
    finally:
        fresh.stop()
