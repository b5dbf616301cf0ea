"""The planner's decisions. Pure: no clock, no network; the simulation and the service run this very code."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from baton.planner.goals import Bounds, Targets, Times
from baton.planner.load import Headroom, Load
from baton.planner.measured import Counts, Fleet, Measured, ServingRole
from baton.planner.plan import Plan, Switch
from baton.planner.sizing import Demand, Estimate, Size, smallest

WORTH_LATE, WORTH_PRESSURE = 0.02, 0.9
"""A worker changes its role to save this share of the requests, or this much of an overload."""
ROLES: tuple[ServingRole, ServingRole] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Workers that the load asks for."""

    now: Counts
    """At once, of the workers that there are."""
    ahead: Size
    """By the time that a new pod would serve."""
    settled: Counts
    """The most that was needed of each role lately: fewer than these would be rash."""


class Planner:
    """Decides again and again; remembers the load, and what it needed lately.

    Their number is set by scaling, their roles by switching: a Deployment grows only if there are too few
    workers of both roles together, and shrinks only if there are too many.
    """

    def __init__(self, targets: Targets, bounds: Bounds, times: Times, *, switches: bool = True) -> None:
        self._targets, self._bounds, self._times = targets, bounds, times
        self._switches = switches and bounds.interchangeable
        self._load = Load(times, Headroom.of(targets.attainment))
        self._needed: deque[tuple[float, Counts]] = deque()

    @property
    def load(self) -> Load:
        """What it knows of the load."""
        return self._load

    def plan(self, seen: Measured) -> Plan:
        """What to do now. Times of measurements never go back."""
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
        ahead = smallest(Estimate(ahead_of, self._targets), self._targets, self._bounds)
        now = self._best_split(Estimate(now_of, self._targets), seen.fleet.ready)
        carries = self._carrying(now_of, seen)
        lately = self._lately(seen, ahead.workers)
        return Needs(
            now=now if now.decode >= carries else Counts(prefill=now.prefill, decode=carries),
            ahead=ahead,
            settled=Counts(prefill=lately.prefill, decode=max(carries, lately.decode)),
        )

    def _best_split(self, estimate: Estimate, ready: Counts) -> Counts:
        """What the load needs now, of no more workers than there are: where they are too few, the roles that
        have the fewest late. If that is hardly better than what there is, what there is: a switch costs."""
        limits = replace(self._bounds, gpu_budget=max(self._bounds.least_gpus, self._bounds.gpus(ready)))
        best = smallest(estimate, self._targets, limits)
        if min(ready.prefill, ready.decode) < 1:
            return best.workers
        there = estimate.size(ready)
        if there.late <= 1 - self._targets.attainment or best.workers.total < ready.total:
            return best.workers
        better = there.late - best.late > WORTH_LATE or best.pressure < WORTH_PRESSURE * there.pressure
        return best.workers if better else ready

    def _lately(self, seen: Measured, needed: Counts) -> Counts:
        """The most that was needed of each role for as long as it takes to settle. As long as that is not
        known, after a start or a pause, what there is counts as needed."""
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
        """Decode workers without which what is under way would not fit or be too slow; at most all."""
        each = demand.decode.most_rows(self._targets.itl_s)
        least = math.ceil(seen.decode.running / each) if each else 0
        return min(least, seen.fleet.ready.decode, self._bounds.max_decode)

    # --- what to end up with

    def _wanted(self, needs: Needs, fleet: Fleet) -> Counts:
        """More at once, fewer only after a while. Within the bounds: where these leave no room for both, what
        is needed ahead goes before what was needed lately."""
        coming, ahead = fleet.to_come, needs.ahead.workers
        kept = {role: max(ahead.of(role), min(coming.of(role), needs.settled.of(role))) for role in ROLES}
        wanted = Counts(prefill=kept["prefill"], decode=kept["decode"])
        if self._switches:
            wanted = _of_those_there(wanted, needs, fleet)
        return wanted if self._bounds.allow(wanted) else ahead

    # --- roles

    def _switch(self, needs: Needs, wanted: Counts, fleet: Fleet) -> tuple[tuple[Switch, ...], Counts]:
        """Which workers change their role, and what there will be of each then."""
        coming = fleet.to_come
        if not self._switches or fleet.switching.total:
            return (), coming  # one change at a time: what it does has to be seen first
        for role, other in (ROLES, ROLES[::-1]):
            count = self._to_switch(role, other, needs, wanted, fleet)
            if count:
                return (Switch(to=role, count=count),), coming.plus(role, count).plus(other, -count)
        return (), coming

    def _to_switch(
        self, role: ServingRole, other: ServingRole, needs: Needs, wanted: Counts, fleet: Fleet
    ) -> int:
        """Workers of ``other`` that are to serve as ``role``."""
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

    def _scale(self, wanted: Counts, after: Counts, fleet: Fleet) -> Counts:
        """What the Deployments are to ask for, given what there will be ``after`` the switches."""
        replicas = fleet.replicas
        lacks = {role: wanted.of(role) - after.of(role) for role in ROLES}
        if self._switches:
            total = wanted.total - after.total
            turned = _by_pods(lacks, wanted, fleet)
            shared = _in_all({role: lacks[role] - turned[role] for role in ROLES}, total)
            lacks = {role: shared[role] + turned[role] for role in ROLES}
        for role in ROLES:
            # One stays: strays that go home with a restart would leave nobody to measure, or to serve.
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
        most = answers.most_rows(self._targets.itl_s)
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


def _of_those_there(wanted: Counts, needs: Needs, fleet: Fleet) -> Counts:
    """No pod is asked for as long as one that is kept for a while only may switch: those that are not needed,
    now or ahead."""
    over = wanted.total - max(fleet.to_come.total, needs.ahead.workers.total)
    for role in ROLES:
        needed = max(needs.ahead.workers.of(role), needs.now.of(role), fleet.unable.of(role))
        fewer = max(0, min(over, wanted.of(role) - needed))
        wanted, over = wanted.plus(role, -fewer), over - fewer
    return wanted


def _homeward(role: ServingRole, wanted: Counts, fleet: Fleet) -> int:
    """Strays of ``role`` that are too many, and that its own Deployment, which keeps a pod, cannot give up:
    theirs can, once they are home."""
    over = min(fleet.ready.of(role), fleet.to_come.of(role)) - wanted.of(role)
    return min(fleet.strays.of(role), over, over - max(0, fleet.replicas.of(role) - 1))


def hold(fleet: Fleet, why: str) -> Plan:
    """Nothing is done."""
    return Plan(
        size=None,
        needed_now=None,
        wanted=fleet.to_come,
        switches=(),
        replicas=fleet.replicas,
        reasons=(f"change nothing: {why}",),
        held=why,
    )


def _by_pods(lacks: dict[ServingRole, int], wanted: Counts, fleet: Fleet) -> dict[ServingRole, int]:
    """Of what the roles lack and have to spare, that which no switch can turn over: those to spare cannot."""
    turned: dict[ServingRole, int] = dict.fromkeys(lacks, 0)
    for role, other in (ROLES, ROLES[::-1]):
        count = min(max(0, lacks[role]), max(0, fleet.unable.of(other) - wanted.of(other)))
        turned[role], turned[other] = turned[role] + count, turned[other] - count
    return turned


def _in_all(lacks: dict[ServingRole, int], total: int) -> dict[ServingRole, int]:
    """So many more pods, or fewer, in all: for the roles that lack them, or have them to spare."""
    sign = 1 if total > 0 else -1
    left, shared = abs(total), dict.fromkeys(lacks, 0)
    for role in sorted(lacks, key=lambda role: -sign * lacks[role]):
        part = min(left, max(0, sign * lacks[role]))
        shared[role], left = sign * part, left - part
    return shared
