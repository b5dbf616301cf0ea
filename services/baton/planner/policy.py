"""The planner's decisions. Pure: no clock, no network; the simulation and the service run the same code."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from baton.planner.demand import DemandEstimate, Headroom
from baton.planner.goals import LatencyTargets, PlanBounds, Times
from baton.planner.measured import Counts, Measured, MeasuredFleet, ServingRole
from baton.planner.plan import Plan, Switch
from baton.planner.sizing import Demand, ServiceEstimate, Size, smallest

WORTH_LATE, WORTH_PRESSURE = 0.02, 0.9
"""The gains that make a switch of roles worth its cost: late requests reduced by more than this share of all,
or the pressure to below this factor of the present one."""
ROLES: tuple[ServingRole, ServingRole] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The workers that the load asks for."""

    now: Counts
    """Workers needed at once, of those that are there."""
    ahead: Size
    """Workers needed by the time that a new pod would serve."""
    settled: Counts
    """The most workers needed of each role lately: to go below them would be rash."""


class Planner:
    """Decides again and again; remembers the load, and the workers that it needed lately.

    Scaling sets the number of workers, switching their roles: a Deployment grows only if the workers of both
    roles together are too few, and shrinks only if they are too many.
    """

    def __init__(
        self, targets: LatencyTargets, bounds: PlanBounds, times: Times, *, switches: bool = True
    ) -> None:
        self._targets, self._bounds, self._times = targets, bounds, times
        self._switches = switches and bounds.interchangeable
        self._load = DemandEstimate(times, Headroom.of(targets.attainment))
        self._needed: deque[tuple[float, Counts]] = deque()

    @property
    def load(self) -> DemandEstimate:
        """The planner's estimate of the load."""
        return self._load

    def plan(self, seen: Measured) -> Plan:
        """Return the plan for now. Times of measurements never go back."""
        stale = seen.age_s > self._times.stale_s
        held = f"the figures are {seen.age_s:.0f} s old" if stale else seen.missing()
        if not held:
            self._load.see(seen)
            held = self._load.worker.unknown()
        if held:
            return hold(seen.fleet, held)
        needs = self._needs(seen)
        wanted = self._wanted(needs, seen.fleet)
        switches, after = self._switch(needs, wanted, seen.fleet)
        replicas = self._scale(wanted, after, seen.fleet)
        reasons = self._reasons(needs, wanted, switches, replicas, seen)
        return Plan(
            size=needs.ahead,
            needed_now=needs.now,
            wanted=wanted,
            switches=switches,
            replicas=replicas,
            reasons=tuple(reasons),
            attainable=self._attains(needs.ahead),
        )

    # --- what is needed

    def _needs(self, seen: Measured) -> Needs:
        ahead_of, now_of = self._load.ahead, self._load.now
        ahead = smallest(ServiceEstimate(ahead_of, self._targets), self._targets, self._bounds)
        now = self._best_split(ServiceEstimate(now_of, self._targets), seen.fleet.ready)
        carries = self._carrying(now_of, seen)
        lately = self._lately(seen, ahead.workers)
        return Needs(
            now=now if now.decode >= carries else Counts(prefill=now.prefill, decode=carries),
            ahead=ahead,
            settled=Counts(prefill=lately.prefill, decode=max(carries, lately.decode)),
        )

    def _best_split(self, estimate: ServiceEstimate, ready: Counts) -> Counts:
        """Return the split that the load needs now, with no more workers than are ready: where they are too
        few, the split with the fewest late requests. Return ``ready`` itself where that split is hardly
        better, since a switch has a cost."""
        limits = replace(self._bounds, gpu_budget=max(self._bounds.min_gpus, self._bounds.gpus(ready)))
        best = smallest(estimate, self._targets, limits)
        if min(ready.prefill, ready.decode) < 1:
            return best.workers
        there = estimate.size(ready)
        if there.late <= 1 - self._targets.attainment or best.workers.total < ready.total:
            return best.workers
        better = there.late - best.late > WORTH_LATE or best.pressure < WORTH_PRESSURE * there.pressure
        return best.workers if better else ready

    def _lately(self, seen: Measured, needed: Counts) -> Counts:
        """The most workers needed of each role during the settle time. While that is unknown, after a start
        or a pause, the workers that are there count as needed."""
        since = seen.at_s - self._times.settle_s
        if self._needed and self._needed[-1][0] < seen.at_s - self._times.stale_s:
            self._needed.clear()
        self._needed.append((seen.at_s, needed))
        while len(self._needed) > 1 and self._needed[1][0] <= since:
            self._needed.popleft()
        every = [need for _, need in self._needed]
        if self._needed[0][0] > since:
            every.append(seen.fleet.to_come)
        return Counts(prefill=max(need.prefill for need in every), decode=max(need.decode for need in every))

    def _carrying(self, demand: Demand, seen: Measured) -> int:
        """The fewest decode workers with which the running sequences fit and are fast enough; at most all."""
        each = demand.decode.max_rows(self._targets.itl_s)
        least = math.ceil(seen.decode.running / each) if each else 0
        return min(least, seen.fleet.ready.decode, self._bounds.max_decode)

    # --- what to end up with

    def _wanted(self, needs: Needs, fleet: MeasuredFleet) -> Counts:
        """Return the workers to end up with: more at once, fewer only after the settle time. If the bounds
        leave no room for both, what is needed ahead goes before what was needed lately."""
        coming, ahead = fleet.to_come, needs.ahead.workers
        kept = {role: max(ahead.of(role), min(coming.of(role), needs.settled.of(role))) for role in ROLES}
        wanted = Counts(prefill=kept["prefill"], decode=kept["decode"])
        if self._switches:
            wanted = _of_those_there(wanted, needs, fleet)
        return wanted if self._bounds.allow(wanted) else ahead

    # --- roles

    def _switch(
        self, needs: Needs, wanted: Counts, fleet: MeasuredFleet
    ) -> tuple[tuple[Switch, ...], Counts]:
        """Return the switches to make, and the workers of each role after them."""
        coming = fleet.to_come
        if not self._switches or fleet.switching.total:
            return (), coming  # one change at a time: its effect has to be measured first
        for role, other in (ROLES, ROLES[::-1]):
            count = self._to_switch(role, other, needs, wanted, fleet)
            if count:
                return (Switch(to=role, count=count),), coming.plus(role, count).plus(other, -count)
        return (), coming

    def _to_switch(
        self, role: ServingRole, other: ServingRole, needs: Needs, wanted: Counts, fleet: MeasuredFleet
    ) -> int:
        """The number of workers of ``other`` that are to serve as ``role``."""
        ready, coming = fleet.ready, fleet.to_come
        sooner = self._times.switch_s < self._times.start_s
        full = not self._bounds.allow(coming.plus(role, 1))
        if not (sooner or full):
            return 0
        urgent = min(needs.now.of(role) - ready.of(role), ready.of(other) - needs.now.of(other))
        spare = min(wanted.of(role) - coming.of(role), ready.of(other) - wanted.of(other))
        keep = max(1, self._least(other), fleet.unable.of(other))
        return max(0, min(max(urgent, spare, _homeward(other, wanted, fleet)), ready.of(other) - keep))

    def _least(self, role: ServingRole) -> int:
        return self._bounds.min_prefill if role == "prefill" else self._bounds.min_decode

    # --- numbers

    def _scale(self, wanted: Counts, after: Counts, fleet: MeasuredFleet) -> Counts:
        """Return the replicas that the Deployments are to ask for; ``after``: the workers after the
        switches."""
        replicas = fleet.replicas
        lacks = {role: wanted.of(role) - after.of(role) for role in ROLES}
        if self._switches:
            total = wanted.total - after.total
            turned = _by_pods(lacks, wanted, fleet)
            shared = _in_all({role: lacks[role] - turned[role] for role in ROLES}, total)
            lacks = {role: shared[role] + turned[role] for role in ROLES}
        for role in ROLES:
            # One pod stays: strays, which return to their home role at a restart, would leave no worker to
            # measure or to serve.
            more = max(lacks[role], min(0, 1 - replicas.of(role)))
            while more > 0 and self._bounds.gpus(replicas.plus(role, more)) > self._bounds.gpu_budget:
                more -= 1
            replicas = replicas.plus(role, more)
        return replicas

    # --- why

    def _attains(self, size: Size) -> bool:
        decode = self._load.ahead.decode
        return size.late <= 1 - self._targets.attainment and not decode.too_slow(self._targets.itl_s)

    def _reasons(
        self, needs: Needs, wanted: Counts, switches: tuple[Switch, ...], replicas: Counts, seen: Measured
    ) -> list[str]:
        fleet, size, ahead = seen.fleet, needs.ahead, self._load.ahead
        said = [f"{each.count} to {each.to}" for each in switches]
        done = [f"switch {', '.join(said)}"] if said else []
        for role in ROLES:
            before, now = fleet.replicas.of(role), replicas.of(role)
            if before != now:
                done.append(f"scale {role} from {before} to {now} pods")
        prompts, answers = ahead.prefill, ahead.decode
        most = answers.max_rows(self._targets.itl_s)
        sequences = answers.rows(size.workers.decode)
        reasons = [
            "; ".join(done) or "change nothing",
            f"ready {fleet.ready}, to come {fleet.to_come}, needed now {needs.now}, in "
            f"{self._times.start_s:.0f} s {size.workers}, lately {needs.settled}, wanted {wanted}",
            f"prefill: {prompts.tokens_per_s:.0f} prompt tokens/s ahead at {prompts.worker_tokens_per_s:.0f} "
            f"a worker keep {prompts.workers_busy:.2f} busy; with {size.workers.prefill}, "
            f"{size.late_prefill:.2%} would be late for {self._targets.ttft_s:g} s",
            f"decode: {answers.tokens_per_s:.0f} answer tokens/s ahead are {sequences:.0f} sequences; a "
            f"worker takes {most:.0f}; with {size.workers.decode}, {size.late_decode:.2%} would be late for "
            f"{self._targets.itl_s * 1e3:g} ms",
            f"forecasts were exceeded by {self._load.headroom:.1%} lately, arrivals vary "
            f"{answers.burstiness:.1f} times as much as independent ones",
        ]
        if not self._attains(size):
            reasons.append(f"nothing within the bounds is enough: {size.late:.1%} would be late")
        if answers.too_slow(self._targets.itl_s):
            reasons.append("a step takes longer than the target even alone: no number of workers helps")
        return reasons


def _of_those_there(wanted: Counts, needs: Needs, fleet: MeasuredFleet) -> Counts:
    """Reduce ``wanted`` so that no pod is asked for while a worker that is kept only for the settle time,
    needed neither now nor ahead, may switch instead."""
    over = wanted.total - max(fleet.to_come.total, needs.ahead.workers.total)
    for role in ROLES:
        needed = max(needs.ahead.workers.of(role), needs.now.of(role), fleet.unable.of(role))
        fewer = max(0, min(over, wanted.of(role) - needed))
        wanted, over = wanted.plus(role, -fewer), over - fewer
    return wanted


def _homeward(role: ServingRole, wanted: Counts, fleet: MeasuredFleet) -> int:
    """The strays of ``role`` that are too many and that the role's own Deployment, which keeps one pod,
    cannot give up: their own Deployment can, once they have switched back."""
    over = min(fleet.ready.of(role), fleet.to_come.of(role)) - wanted.of(role)
    return min(fleet.strays.of(role), over, over - max(0, fleet.replicas.of(role) - 1))


def hold(fleet: MeasuredFleet, why: str) -> Plan:
    """A plan that changes nothing."""
    return Plan(
        size=None,
        needed_now=None,
        wanted=fleet.to_come,
        switches=(),
        replicas=fleet.replicas,
        reasons=(f"change nothing: {why}",),
        held=why,
    )


def _by_pods(lacks: dict[ServingRole, int], wanted: Counts, fleet: MeasuredFleet) -> dict[ServingRole, int]:
    """The part of the lacks that no switch can cover, because the workers to spare cannot switch."""
    turned: dict[ServingRole, int] = dict.fromkeys(lacks, 0)
    for role, other in (ROLES, ROLES[::-1]):
        count = min(max(0, lacks[role]), max(0, fleet.unable.of(other) - wanted.of(other)))
        turned[role], turned[other] = turned[role] + count, turned[other] - count
    return turned


def _in_all(lacks: dict[ServingRole, int], total: int) -> dict[ServingRole, int]:
    """Share ``total`` more pods, or fewer if negative, among the roles that lack them, or have them to
    spare."""
    sign = 1 if total > 0 else -1
    left, shared = abs(total), dict.fromkeys(lacks, 0)
    for role in sorted(lacks, key=lambda role: -sign * lacks[role]):
        part = min(left, max(0, sign * lacks[role]))
        shared[role], left = sign * part, left - part
    return shared
