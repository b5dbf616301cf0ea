"""The workers, the choice of workers to switch, and the requests to switch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.net.channels import Dialer
from baton.planner.measured import Counts, ServingRole
from baton.planner.prometheus import Prometheus
from baton.planner.switch_role import SwitchError, switch_role
from baton.router.discovery.endpoint import Endpoint

SERVING: Mapping[str, ServingRole] = MappingProxyType({"prefill": "prefill", "decode": "decode"})
"""The roles that the planner counts. Workers that serve both roles are not counted."""
PEACE_S = 600.0
"""The time in which a worker is not asked again after a failed switch, in seconds: it drained in vain, and
would again."""
TRUSTED_S = 60.0
"""The time after a switch in which the worker's reply outweighs Prometheus, which may not know of it yet, in
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A ready worker."""

    address: str
    home: ServingRole
    """The role that the worker's Deployment starts it in."""
    role: ServingRole
    """The role that the worker has."""
    load: float
    """Sequences on the worker."""
    refused: bool = False
    """Whether the worker failed to switch lately and is left alone for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReports:
    """What routers report of the workers that they are connected to, by address."""

    roles: Mapping[str, ServingRole]
    """Roles of the workers that are ready and do not drain."""
    loads: Mapping[str, float]


async def read_reports(prometheus: Prometheus, selector: str) -> RouterReports:
    """Read what routers report. A router has the role from the worker's own greeting. Raises
    PrometheusError."""
    ready, draining, running = await asyncio.gather(
        prometheus.series(f"max by (worker, role) (baton_worker_ready{{{selector}}}) == 1"),
        prometheus.series(f"max by (worker) (baton_worker_draining{{{selector}}}) == 1"),
        prometheus.series(f"max by (worker) (baton_worker_sequences_running{{{selector}}})"),
    )
    leaving = {labels.get("worker", "") for labels, _ in draining}
    roles: dict[str, ServingRole] = {}
    for labels, _ in ready:
        worker, role = labels.get("worker", ""), SERVING.get(labels.get("role", ""))
        if worker not in leaving and role is not None:
            roles[worker] = role
    return RouterReports(roles=roles, loads={labels.get("worker", ""): number for labels, number in running})


class Workers:
    """Has workers switch in the background, and remembers their replies until Prometheus knows them."""

    def __init__(
        self, keys: ClusterKeys, dialer: Dialer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys, self._dialer, self._clock = keys, dialer, clock
        self._switching: dict[str, tuple[ServingRole, asyncio.Task[None]]] = {}
        self._said: dict[str, tuple[ServingRole, float]] = {}
        self._refused: dict[str, float] = {}

    def ready(self, endpoints: Sequence[Endpoint], told: RouterReports) -> list[PlannedWorker]:
        """Return the workers that discovery admits and a router is connected to, except workers that are
        switching."""
        now = self._clock()
        self._said = {address: said for address, said in self._said.items() if now < said[1] + TRUSTED_S}
        self._refused = {address: at for address, at in self._refused.items() if now < at + PEACE_S}
        found = []
        for each in endpoints:
            role = self._role(each.address, told)
            home = each.role
            if each.admits and role is not None and (home == "prefill" or home == "decode"):
                found.append(
                    PlannedWorker(
                        address=each.address,
                        home=home,
                        role=role,
                        load=told.loads.get(each.address, 0.0),
                        refused=each.address in self._refused,
                    )
                )
        return found

    def _role(self, address: str, told: RouterReports) -> ServingRole | None:
        if address in self._switching:
            return None
        said = self._said.get(address)
        return said[0] if said is not None else told.roles.get(address)

    @property
    def switching(self) -> Mapping[str, ServingRole]:
        """Addresses of workers that are switching, with their new roles."""
        return {address: role for address, (role, _) in self._switching.items()}

    def switch(
        self,
        worker: PlannedWorker,
        to: ServingRole,
        ended: Callable[[PlannedWorker, float | SwitchError], None],
    ) -> None:
        """Begin a switch; ``ended`` gets the seconds until the worker serves as ``to``, or the error."""
        task = asyncio.create_task(self._switch(worker, to, ended), name=f"switch {worker.address}")
        self._switching[worker.address] = (to, task)

    async def _switch(
        self,
        worker: PlannedWorker,
        to: ServingRole,
        ended: Callable[[PlannedWorker, float | SwitchError], None],
    ) -> None:
        try:
            done = await switch_role(worker.address, to, self._keys, dialer=self._dialer)
            if done.now != to:
                raise SwitchError(worker.address, grpc.StatusCode.UNKNOWN, f"it serves as {done.now}")
            self._said[worker.address] = (to, self._clock())
            ended(worker, done.seconds)
        except SwitchError as error:
            self._refused[worker.address] = self._clock()
            ended(worker, error)
        finally:
            del self._switching[worker.address]

    async def close(self) -> None:
        """Cancel the requests without waiting for the switches: a switch that has begun goes on without its
        caller."""
        tasks = [task for _, task in self._switching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def count_ready(workers: Sequence[PlannedWorker]) -> Counts:
    """Count workers by the role that they have."""
    prefill = sum(each.role == "prefill" for each in workers)
    return Counts(prefill=prefill, decode=len(workers) - prefill)


def count_strays(workers: Sequence[PlannedWorker]) -> Counts:
    """Count workers whose Deployment starts the other role, by the role that they have."""
    away = [each.role for each in workers if each.role != each.home]
    return Counts(prefill=away.count("prefill"), decode=away.count("decode"))


def to_switch(workers: Sequence[PlannedWorker], to: ServingRole, count: int) -> list[PlannedWorker]:
    """Choose the workers to ask: first workers that return to their home role, then those with the least
    load."""
    able = [each for each in workers if each.role != to and not each.refused]
    return sorted(able, key=lambda each: (each.home != to, each.load, each.address))[:count]
