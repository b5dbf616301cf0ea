"""A ring of simulated workers is rolled out under load, and every answer and handoff is looked at."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton import hub
from baton.models.config import ModelConfig
from tests.support import release
from tests.support.kubelet import Pod
from tests.support.rollout.fleet import Fleet, Release
from tests.support.rollout.judge import (
    ForeignTokenError,
    Handoffs,
    handoffs,
    revisions_of,
    wrong_with,
)
from tests.support.rollout.questions import Client, Question, Reply
from tests.support.rollout.scenarios import SCENARIOS, Releases

CALM = "nothing"
PROFILE = {"step_row_ms": 0.2, "context_ms_per_1k": 0.1, "prefill_ms_per_1k": 30}
"""And ``Plan.step_ms``."""
NEVER_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    scenarios: Sequence[str] = tuple(SCENARIOS)
    seed: int = 1
    replicas: int = 2
    routers: int = 2
    clients: int = 16
    longest: int = 240
    """Tokens of an answer."""
    seats: int = 256
    """Answers that a decode worker writes at once."""
    step_ms: float = 25.0
    """Of a worker with one answer."""
    calm_s: float = 10.0
    """Load before, between and after the scenarios."""
    pre_stop_s: int = 2
    hurry: float = 1.0
    """How much more often probes are asked than the chart says."""
    lag_s: tuple[float, float] = (0.1, 1.0)
    """From a change of a pod to its EndpointSlice."""
    sync_s: float = 0.5
    """The longest time until a Deployment's controller looks again."""

    @property
    def gets_stuck(self) -> bool:
        return "never ready" in self.scenarios


@dataclass
class Stage:
    """What clients saw while one thing was done."""

    seconds: float = 0.0
    answers: int = 0
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    resumed_elsewhere: int = 0
    """Answers with tokens of two revisions: nobody of the first one was left."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of a stream, but for slow clients."""
    first_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Answers cut, repeated or not as they should be."""


@dataclass
class Report:
    stages: dict[str, Stage] = field(default_factory=dict)
    handoffs: Handoffs = field(default_factory=Handoffs)
    counted: dict[str, float] = field(default_factory=dict)
    """By the routers together."""
    pods: int = 0
    """Worker pods that there have been."""
    problems: list[str] = field(default_factory=list)
    """With pods and rollouts."""

    @property
    def violations(self) -> list[str]:
        found = [
            f"{name}: {each}"
            for name, stage in self.stages.items()
            for each in (*stage.failures, *stage.wrong)
        ]
        if self.handoffs.cross:
            found.append(f"handoffs between revisions: {self.handoffs.pairs}")
        if self.handoffs.refused:
            found.append(f"workers refused {self.handoffs.refused} links that routers asked for")
        return found + self.problems


class Load:
    """Clients that ask one question after the other, of both routers."""

    def __init__(self, fleet: Fleet, plan: Plan, rng: random.Random) -> None:
        self.stage = CALM
        self.replies: list[Reply] = []
        self.seconds: dict[str, float] = {}
        self._plan = plan
        self._rng = rng
        self._over = False
        self._since = time.monotonic()
        self._clients = [Client(_url(each), f"{each.ip}:{each.port('grpc')}") for each in fleet.routers]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [
            asyncio.create_task(self._ask(self._clients[number % len(self._clients)]))
            for number in range(self._plan.clients)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answers that have begun are read to their end."""
        self._over = True
        await asyncio.gather(*self._tasks)
        for client in self._clients:
            await client.close()
        self.enter(self.stage)

    def enter(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._since
        self.stage, self._since = stage, now

    async def _ask(self, client: Client) -> None:
        while not self._over:
            question = Question.draw(self._rng, self._plan.longest)
            self.replies.append(await client.ask(question, lambda: self.stage))
            await asyncio.sleep(self._rng.expovariate(10))


def run(folder: Path, plan: Plan) -> Report:
    return asyncio.run(carried_out(folder, plan))


async def carried_out(folder: Path, plan: Plan) -> Report:
    """Logs of all pods go into folders below ``folder``."""
    rng = random.Random(plan.seed)
    report = Report()
    installing = release.Release(folder, "simulated", _values(folder, plan))
    async with installing.installed(plan.hurry, lambda: rng.uniform(*plan.lag_s)) as cluster:
        profile = {**PROFILE, "step_base_ms": plan.step_ms}
        names = [f"r{number}" for number in range(len(plan.scenarios) + 1)]
        old, *new = [_rendered(installing, folder, name, profile) for name in names]
        never = {**profile, "load_s": NEVER_S}
        stuck = _rendered(installing, folder, "stuck", never) if plan.gets_stuck else old
        async with Fleet(cluster, old, rng, plan.sync_s, plan.routers) as fleet:
            async with Load(fleet, plan, rng) as load:
                await asyncio.sleep(plan.calm_s)
                for name, coming in zip(plan.scenarios, new, strict=True):
                    load.enter(name)
                    try:
                        await SCENARIOS[name](fleet, Releases(old, coming, stuck))
                    except (TimeoutError, AssertionError) as error:
                        report.problems.append(f"{name}: {error!r}")
                    load.enter(CALM)
                    await asyncio.sleep(plan.calm_s)
                    old = fleet.deployments["decode"].wanted
            report.counted = await _counted(fleet.routers)
            report.problems += fleet.ended_badly()
            _judge(report, fleet, load)
    return report


def _values(folder: Path, plan: Plan) -> dict[str, Any]:
    """Those of the example, but for what one machine has no room for, and records of every handoff."""
    worker = {"replicas": plan.replicas, "preStopSeconds": plan.pre_stop_s}
    return {
        "redis": {"mode": "none"},
        "router": {"options": {"disaggregation": "always"}},
        "workers": {"options": {"logLevel": "debug"}},
        "prefill": worker,
        "decode": {**worker, "options": {"maxNumSeqs": plan.seats}},
    }


def _rendered(
    installing: release.Release, folder: Path, revision: str, profile: Mapping[str, float]
) -> Release:
    path = folder / f"{revision}.json"
    path.write_text(json.dumps(profile))
    simulated = {"revision": revision, "profile": str(path)}
    return Release(revision, installing.objects({"workers": {"simulated": simulated}}))


def _url(router: Pod) -> str:
    return f"http://{router.ip}:{router.port('http')}"


async def _counted(routers: Sequence[Pod]) -> dict[str, float]:
    counted: dict[str, float] = {}
    async with httpx.AsyncClient() as http:
        for router in routers:
            page = (await http.get(f"{_url(router)}/metrics")).text
            for line in page.splitlines():
                if re.match(r"baton_(resumes|attempts|requests_given_up|placements)_total", line):
                    name, _, value = line.rpartition(" ")
                    counted[name] = counted.get(name, 0.0) + float(value)
    return counted


def _judge(report: Report, fleet: Fleet, load: Load) -> None:
    vocab_size = ModelConfig.from_dir(hub.resolve_model("demo")).vocab_size
    revisions = sorted({each.revision for each in fleet.workers})
    for reply in load.replies:
        stage = report.stages.setdefault(reply.stage, Stage())
        _judge_one(stage, reply, revisions, vocab_size)
    for name, seconds in load.seconds.items():
        report.stages.setdefault(name, Stage()).seconds = seconds
    report.handoffs = handoffs((each.revision, each.pod.log.read_text()) for each in fleet.workers)
    report.pods = len(fleet.workers)


def _judge_one(stage: Stage, reply: Reply, revisions: Sequence[str], vocab_size: int) -> None:
    told = f"{reply.question.kind} of {reply.question.length}"
    wrong = wrong_with(reply)
    if wrong is not None:
        stage.failures.append(f"{told}: {wrong}")
        return
    try:
        by_choice = revisions_of(reply, revisions, vocab_size)
    except ForeignTokenError as error:
        stage.wrong.append(f"{told}: {error}")
        return
    stage.answers += len(by_choice)
    stage.kinds[reply.question.kind] += 1
    stage.tokens += sum(map(len, by_choice))
    stage.resumed_elsewhere += sum(len(set(each)) > 1 for each in by_choice)
    if reply.question.streamed and reply.question.kind != "slow":
        for times in reply.arrivals.values():
            stage.first_s.append(times[0] - reply.asked)
            stage.gaps_s += [two - one for one, two in itertools.pairwise(times)]


def total(stages: Mapping[str, Stage]) -> Stage:
    """Of all stages."""
    whole = Stage()
    for stage in stages.values():
        whole.seconds += stage.seconds
        whole.answers += stage.answers
        whole.tokens += stage.tokens
        whole.kinds += stage.kinds
        whole.resumed_elsewhere += stage.resumed_elsewhere
        whole.gaps_s += stage.gaps_s
        whole.first_s += stage.first_s
        whole.failures += stage.failures
        whole.wrong += stage.wrong
    return whole
