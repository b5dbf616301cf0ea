"""The planner's loop: measure, decide, act."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from baton.planner.goals import PlanBounds
from baton.planner.measured import Counts, Measured, MeasuredFleet, ServingRole
from baton.planner.plan import Plan
from baton.planner.policy import ROLES, Planner
from baton.planner.prometheus import Prometheus, PrometheusError
from baton.planner.queries import IncompleteError, Queries, measure
from baton.planner.scales import Scale, Scales
from baton.planner.switch_role import SwitchError
from baton.planner.workers import PlannedWorker, Workers, count_ready, count_strays, read_reports, to_switch
from baton.router.discovery.api_server import ApiServerError
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.telemetry.planner import PlannerMetrics

log = logging.getLogger(__name__)

CONFLICT = 409
API_ERRORS = (ApiServerError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The workers and scales of one moment, and the fleet that they are."""

    workers: Sequence[PlannedWorker]
    scales: dict[ServingRole, Scale]
    fleet: MeasuredFleet


class HeldError(Exception):
    """Nothing can be decided now. ``by``: what is missing, as the metric's label."""

    def __init__(self, by: str, why: str) -> None:
        super().__init__(why)
        self.by = by


class PlannerService:
    """One ring's planner. It changes nothing while it does not know enough, and says so."""

    def __init__(
        self,
        planner: Planner,
        queries: Queries,
        prometheus: Prometheus,
        scales: Scales,
        discovery: Discovery,
        workers: Workers,
        metrics: PlannerMetrics,
        bounds: PlanBounds,
        *,
        stale_s: float,
        dry_run: bool,
    ) -> None:
        self._planner, self._queries, self._prometheus = planner, queries, prometheus
        self._scales, self._discovery, self._workers = scales, discovery, workers
        self._metrics, self._bounds = metrics, bounds
        self._stale_s, self._dry_run = stale_s, dry_run
        self._said = ""
        self._heard = asyncio.Event()
        """Set once the API server has reported the workers."""

    @property
    def switching(self) -> bool:
        """Whether a switch is under way."""
        return bool(self._workers.switching)

    def hear(self, endpoints: Sequence[Endpoint]) -> None:
        """Take the workers that discovery reports."""
        self._heard.set()

    async def run(self, interval_s: float) -> None:
        """Decide every ``interval_s`` seconds, until cancelled."""
        await self._first_word()
        while True:
            began = time.monotonic()
            await self.decide()
            await asyncio.sleep(max(0.0, began + interval_s - time.monotonic()))

    async def _first_word(self) -> None:
        """Wait until the API server has reported the workers, or for as long as it may be silent: before that
        there is nothing to decide and nothing to complain of."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stale_s):
                await self._heard.wait()

    async def decide(self) -> Plan | None:
        """Make one decision; return None if none could be made."""
        try:
            look = await self._look()
            seen = await self._measure(look.fleet)
        except HeldError as error:
            self._hold(error.by, str(error))
            return None
        self._metrics.age.set(seen.age_s)
        plan = self._planner.plan(seen)
        if plan.held:
            self._hold("measurements", plan.held)
            return plan
        self._show(plan, look.fleet)
        acts = plan.acts(look.fleet.replicas)
        self._metrics.decisions.labels(
            "unchanged" if not acts else "dry_run" if self._dry_run else "acted"
        ).inc()
        self._say(plan.reasons, loud=acts)
        if acts and not self._dry_run:
            await self._act(plan, look)
        return plan

    # --- looking

    async def _look(self) -> Look:
        silence_s = self._discovery.staleness_s
        if silence_s > self._stale_s:
            since = "yet" if math.isinf(silence_s) else f"for more than {self._stale_s:g} s"
            raise HeldError("kubernetes", f"the API server has not told who the workers are {since}")
        try:
            known = await read_reports(self._prometheus, self._queries.selector)
        except PrometheusError as error:
            raise HeldError("prometheus", str(error)) from error
        try:
            scales = {role: await self._scales.read(role) for role in ROLES}
        except API_ERRORS as error:
            raise HeldError("kubernetes", f"no scale: {error or type(error).__name__}") from error
        workers = self._workers.ready(self._discovery.known, known)
        return Look(workers=workers, scales=scales, fleet=self._fleet(workers, scales))

    def _fleet(self, workers: Sequence[PlannedWorker], scales: dict[ServingRole, Scale]) -> MeasuredFleet:
        """Return the fleet, in which workers that switch count in their new role."""
        coming = self._workers.switching
        homes = {each.address: each.role for each in self._discovery.known}
        away = count_strays(workers)
        for address, to in coming.items():
            if homes.get(address) not in (None, to):
                away = away.plus(to, 1)
        return MeasuredFleet(
            ready=count_ready(workers),
            switching=Counts(
                prefill=list(coming.values()).count("prefill"), decode=list(coming.values()).count("decode")
            ),
            replicas=Counts(prefill=scales["prefill"].replicas, decode=scales["decode"].replicas),
            strays=away,
            unable=count_ready([each for each in workers if each.refused]),
        )

    async def _measure(self, fleet: MeasuredFleet) -> Measured:
        try:
            return await measure(self._prometheus, self._queries, fleet, time.monotonic())
        except PrometheusError as error:
            raise HeldError("prometheus", str(error)) from error
        except IncompleteError as error:
            raise HeldError("measurements", str(error)) from error

    # --- acting

    async def _act(self, plan: Plan, look: Look) -> None:
        for switch in plan.switches:
            for worker in to_switch(look.workers, switch.to, switch.count):
                self._workers.switch(worker, switch.to, self._switched)
        for role in ROLES:
            scale, replicas = look.scales[role], plan.replicas.of(role)
            if replicas != scale.replicas:
                await self._scale(role, scale, replicas)

    async def _scale(self, role: ServingRole, scale: Scale, replicas: int) -> None:
        result = "ok"
        try:
            await self._scales.write(role, replicas, scale.version)
        except API_ERRORS as error:
            conflict = isinstance(error, ApiServerError) and error.status == CONFLICT
            result = "conflict" if conflict else "failed"
            why = "somebody else has changed it" if conflict else error or type(error).__name__
            log.warning("%s stays at %d pods: %s", role, scale.replicas, why)
        direction = "up" if replicas > scale.replicas else "down"
        self._metrics.scalings.labels(role, direction, result).inc()

    def _switched(self, worker: PlannedWorker, what: float | SwitchError) -> None:
        to: ServingRole = "decode" if worker.role == "prefill" else "prefill"
        failed = isinstance(what, SwitchError)
        self._metrics.switches.labels(to, "failed" if failed else "switched").inc()
        if failed:
            log.warning("%s stays %s: %s", worker.address, worker.role, what)
        else:
            log.info("%s serves as %s after %.1f s", worker.address, to, what)

    # --- saying

    def _hold(self, by: str, why: str) -> None:
        self._metrics.decisions.labels("held").inc()
        self._metrics.held.labels(by).inc()
        self._say((f"change nothing: {why}",), loud=True)

    def _say(self, reasons: tuple[str, ...], *, loud: bool) -> None:
        """Log what is done and why: at INFO when it changes, at DEBUG otherwise."""
        level = logging.INFO if loud and reasons[0] != self._said else logging.DEBUG
        log.log(level, "%s%s", "dry run: " if self._dry_run else "", "; ".join(reasons))
        self._said = reasons[0]

    def _show(self, plan: Plan, fleet: MeasuredFleet) -> None:
        assert plan.size is not None and plan.needed_now is not None
        metrics, load = self._metrics, self._planner.load
        by_state = {
            "ready": fleet.ready,
            "switching": fleet.switching,
            "to_come": fleet.to_come,
            "needed": plan.needed_now,
            "needed_ahead": plan.size.workers,
            "wanted": plan.wanted,
        }
        for role in ROLES:
            for state, counts in by_state.items():
                metrics.workers.labels(role, state).set(counts.of(role))
            metrics.replicas.labels(role).set(fleet.replicas.of(role))
        metrics.late.labels("prefill").set(plan.size.late_prefill)
        metrics.late.labels("decode").set(plan.size.late_decode)
        for when, demand in (("now", load.now), ("ahead", load.ahead)):
            metrics.load.labels("prefill", when).set(demand.prefill.tokens_per_s)
            metrics.load.labels("decode", when).set(demand.decode.tokens_per_s)
        metrics.headroom.set(load.headroom)
        metrics.burstiness.set(load.burstiness)
        metrics.gpus.set(self._bounds.gpus(plan.wanted))
        metrics.attainable.set(plan.attainable)
