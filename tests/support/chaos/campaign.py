"""A campaign of chaos over one connector: rounds of faults, restarts in turn, and ordinary cancels."""

from __future__ import annotations

import asyncio
import math
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.support.chaos.catalogue import Catalogue
from tests.support.chaos.client import ChaosClient
from tests.support.chaos.faults import Done, FaultError, Faults
from tests.support.chaos.findings import Findings, Violation
from tests.support.chaos.fleet import EXIT_RETIRED, READY_S, ROLES, Fleet, Member, Usage, running_fleet
from tests.support.chaos.load import MOMENTS, Load

MAX_ASKED = 8
"""Times that all questions are asked, until every worker has taken part."""
ZERO_WITHIN_S = 45.0
CANCEL_WITHIN_S = 1.0
CANCELS_FOR_P99 = 200
"""Fewer say nothing of a 99th percentile: they must only be over within ZERO_WITHIN_S."""
SERVES_WITHIN_S = 30.0
MORE_FDS, MORE_THREADS = 24, 12
"""What a worker may have open more at a later rest than at the first: links come and go."""
SHARES = MappingProxyType({"kill": 18, "freeze": 20, "stall": 17, "leave": 20, "cut": 25})
ENOUGH_VIOLATIONS = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    kind: str
    seed: int
    rounds: int
    restarts: int = 0
    """Of each role."""
    cancels: int = 0
    clients: int = 12
    rounds_between_rests: int = 25
    max_wait_s: float = 0.8
    max_s: float = math.inf
    """Seconds after which no round is begun."""
    faults: Mapping[str, int] = field(default_factory=lambda: SHARES)
    """How often each kind is drawn."""
    pace: bool = True
    """Have blocks travel slowly."""


@dataclass
class Report:
    kind: str
    model: str
    seed: int
    rounds: int = 0
    round_s: float = 0.0
    """On average."""
    faults: dict[str, int] = field(default_factory=dict)
    completed: int = 0
    tokens: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    to_zero_s: list[float] = field(default_factory=list)
    cancels_s: list[float] = field(default_factory=list)
    restarts_s: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    """From the start of a process to its first handoff."""
    retired: int = 0
    events: dict[str, int] = field(default_factory=dict)
    """What workers counted, as far as they lived to tell at a rest."""
    most_fds: int = 0
    most_threads: int = 0
    """Of any worker at rest, above what it had at its first."""
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)


class Campaign:
    """Runs a plan on a fleet and writes down what it finds. Random choices follow the plan's seed; how the
    processes interleave, nobody decides."""

    def __init__(self, fleet: Fleet, catalogue: Catalogue, plan: Plan, client: ChaosClient) -> None:
        self.report = Report(plan.kind, catalogue.model, plan.seed)
        self._fleet = fleet
        self._plan = plan
        self._rng = fleet.rng
        self._findings = Findings()
        self._events: dict[int, Counter[str]] = {}
        """By process."""
        rng = random.Random(plan.seed + 1)
        self._load = Load(client, catalogue.questions, rng, plan.clients, self._findings)
        self._faults = Faults(fleet, client, catalogue.long, self._findings)

    async def run(self) -> Report:
        began = time.monotonic()
        await self._rest()
        if self._plan.rounds:
            await self._rounds()
        if self._plan.restarts:
            await self._restarts()
        if self._plan.cancels:
            await self._cancels()
        tally, report = self._load.tally, self.report
        report.completed, report.tokens, report.failed = tally.completed, tally.tokens, dict(tally.failed)
        report.reasons = dict(tally.reasons.most_common())
        report.events = dict(sum(self._events.values(), Counter()))
        report.violations = self._findings.violations
        report.slowest_s, report.seconds = tally.slowest_s, time.monotonic() - began
        return report

    @property
    def _over(self) -> bool:
        return len(self._findings.violations) >= ENOUGH_VIOLATIONS

    # --- rounds

    async def _rounds(self) -> None:
        began = time.monotonic()
        self._load.start()
        for number, kind in enumerate(self._kinds(), start=1):
            if time.monotonic() - began > self._plan.max_s:
                break
            self._findings.moment = f"round {number}"
            if self._plan.pace:
                await self._faults.pace()
            await self._wait()
            await self._inject(kind)
            self.report.rounds = number
            await self._bury()
            if self._over:
                break
            if number % self._plan.rounds_between_rests == 0 and number < self._plan.rounds:
                await self._rest()
                self._load.start()
        await self._rest()
        self.report.round_s = (time.monotonic() - began) / max(1, self.report.rounds)

    def _kinds(self) -> list[str]:
        """Of each round: every kind once, in any order, and then as they are drawn."""
        kinds, shares = list(self._plan.faults), list(self._plan.faults.values())
        first = self._rng.sample(kinds, len(kinds))
        return (first + self._rng.choices(kinds, shares, k=self._plan.rounds))[: self._plan.rounds]

    async def _wait(self) -> None:
        """Until any moment, or until just after something has happened to some request."""
        longest = self._plan.max_wait_s
        if self._rng.random() < 0.4:
            await asyncio.sleep(self._rng.uniform(0, longest))
        else:
            await self._load.moment(self._rng.choice(MOMENTS), longest)
            await asyncio.sleep(self._rng.uniform(0, 0.03))

    async def _inject(self, kind: str) -> None:
        try:
            done: Done = await getattr(self._faults, kind)()
        except (FaultError, OSError) as error:  # a worker that has ended refuses to be asked
            self._findings.violation(f"a fault had no effect: {kind}: {error}")
            return
        self.report.faults[done.kind] = self.report.faults.get(done.kind, 0) + 1
        self._findings.did(str(done))

    async def _bury(self) -> None:
        """Look after workers that ended by themselves, as a supervisor would."""
        for member in self._fleet.in_state("up", "frozen"):
            status = member.service.process.poll()
            if status is None:
                continue
            member.state = "down"
            self._findings.did(f"{member.name} ended by itself with {status}")
            if status == EXIT_RETIRED:
                self.report.retired += 1
            else:
                self._findings.violation(f"{member.name} ended by itself with {status}")
            await member.restart()

    # --- rest

    async def _rest(self) -> None:
        """Without load, everything must be given back, and every request must be answered."""
        await self._load.stop()
        await self._faults.settle()
        await self._until_zero()
        await self._in_calm()
        await self._until_zero()
        self._measure()
        self._read_logs()

    async def _until_zero(self) -> None:
        began = time.monotonic()
        while accounts := await self._held() or await self._spare():
            await self._bury()
            if time.monotonic() - began > ZERO_WITHIN_S:
                self._findings.violation(
                    f"{ZERO_WITHIN_S:.0f} s after the last request there is still {accounts}"
                )
                return
            await asyncio.sleep(0.02)
        self.report.to_zero_s.append(time.monotonic() - began)

    async def _held(self) -> dict[str, dict[str, int]]:
        members = self._fleet.in_state("up")
        accounts = await asyncio.gather(*(asyncio.to_thread(m.held) for m in members))
        return {m.name: account for m, account in zip(members, accounts, strict=True) if account}

    async def _spare(self) -> dict[str, dict[str, int]]:
        spare = await asyncio.to_thread(self._fleet.spare_connections)
        return {name: {"connections to decode without a link": count} for name, count in spare.items()}

    async def _in_calm(self) -> None:
        """Nothing is done to anybody: no request may fail, and every worker must take part."""
        try:
            await asyncio.to_thread(self._fleet.ring.wait_workers, READY_S)
        except TimeoutError as error:
            self._findings.violation(str(error))
            return
        before = {m.name: m.handoffs() for m in self._fleet.members}
        idle = list(before)
        for _ in range(MAX_ASKED):  # who is asked first is whoever looks fastest
            for reply in await self._load.once():
                if reply.failure is not None:
                    self._findings.violation(f"in calm a request failed: {reply.failure}")
            idle = [m.name for m in self._fleet.members if m.handoffs() == before[m.name]]
            if not idle:
                return
        self._findings.violation(f"no request in calm went through {', '.join(idle)}")

    def _measure(self) -> None:
        for member in self._fleet.members:
            self._events[member.pid] = member.events()
            now = Usage.of(member.pid)
            first = member.at_first_rest = member.at_first_rest or now
            fds, threads = now.fds.total() - first.fds.total(), now.threads.total() - first.threads.total()
            self.report.most_fds = max(self.report.most_fds, fds)
            self.report.most_threads = max(self.report.most_threads, threads)
            if fds > MORE_FDS or threads > MORE_THREADS:
                self._findings.violation(
                    f"{member.name} has {fds} more files and {threads} more threads open",
                    [f"more: {dict(now.fds - first.fds)}, {dict(now.threads - first.threads)}"],
                )

    def _read_logs(self) -> None:
        for name, log in self._fleet.logs.items():
            for record in log.records():
                if re.search(r"^\S+ \S+ ERROR |^Traceback", record, re.MULTILINE):
                    self._findings.violation(f"{name} logged an error", record.splitlines()[:20])
                if "checksum differs" in record:
                    self._findings.violation(f"{name}: a page changed during its transfer", [record])

    # --- restarts

    async def _restarts(self) -> None:
        """Each worker in turn ends under load, by SIGKILL or SIGTERM, and starts again where it was."""
        self._load.start()
        for number in range(self._plan.restarts * len(ROLES)):
            role = ROLES[number % len(ROLES)]
            members = self._fleet.of_role(role)
            member = members[number // len(ROLES) % len(members)]
            how = self._rng.choice((signal.SIGKILL, signal.SIGTERM))
            self._findings.moment = f"restart {number + 1}"
            self._findings.did(f"{how.name} to {member.name}")
            await self._wait()
            await self._end(member, how)
            began = time.monotonic()
            await member.restart()
            if await self._serves(member):
                self.report.restarts_s[role].append(time.monotonic() - began)
            await self._bury()
            if self._over:
                break
            if (number + 1) % self._plan.rounds_between_rests == 0:
                await self._rest()
                self._load.start()
        await self._rest()

    async def _end(self, member: Member, how: signal.Signals) -> None:
        """SIGTERM lets a worker end what it has: no request may fail of it."""
        failed = self._load.tally.failed.total()
        try:
            await self._faults.end(member, how)
        except FaultError as error:
            self._findings.violation(str(error))
        failed = self._load.tally.failed.total() - failed
        if how == signal.SIGTERM and failed:
            self._findings.violation(f"{failed} requests failed while {member.name} drained")

    async def _serves(self, member: Member) -> bool:
        """Whether the worker takes part again, soon."""
        deadline = time.monotonic() + SERVES_WITHIN_S
        while time.monotonic() < deadline:
            if await asyncio.to_thread(member.handoffs):
                return True
            await asyncio.sleep(0.05)
        self._findings.violation(f"{member.name} handed nothing on in {SERVES_WITHIN_S} s after its restart")
        return False

    # --- cancels

    async def _cancels(self) -> None:
        """Clients leave an undisturbed ring; how long until it has its blocks back."""
        while len(self.report.cancels_s) < self._plan.cancels and not self._over:
            self._findings.moment = f"cancel {len(self.report.cancels_s) + 1}"
            try:
                left = await self._faults.leave_together(self._rng.choice((1, 1, 3)))
            except FaultError as error:
                self._findings.violation(str(error))
                continue
            if not left:
                continue
            since = max(talk.left_at for talk in left)
            while accounts := await self._held():
                if time.monotonic() - since > ZERO_WITHIN_S:
                    self._findings.violation(
                        f"{ZERO_WITHIN_S:.0f} s after a cancel there is still {accounts}"
                    )
                    break
            self.report.cancels_s += [time.monotonic() - since] * len(left)
        if len(self.report.cancels_s) >= CANCELS_FOR_P99:
            p99 = percentile(self.report.cancels_s, 99)
            if p99 > CANCEL_WITHIN_S:
                self._findings.violation(f"the 99th percentile of cancels is {p99:.2f} s")
        await self._rest()


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that ``percent`` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def _campaign(fleet: Fleet, catalogue: Catalogue, plan: Plan) -> Report:
    async with ChaosClient(fleet.ring.url, catalogue.model) as client:
        return await Campaign(fleet, catalogue, plan, client).run()


def run(tmp: Path, catalogue: Catalogue, plan: Plan) -> Report:
    """Start a fleet, with its logs in ``tmp``, and carry the plan out."""
    rng = random.Random(plan.seed)
    with running_fleet(tmp, catalogue.path, plan.kind, rng) as fleet:
        return asyncio.run(_campaign(fleet, catalogue, plan))
