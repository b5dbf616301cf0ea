"""The scalers that decide how many pods run: the planner that ships, or two HorizontalPodAutoscalers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from baton.planner.measured import Arrivals, DecodeState, Measured, PrefillState, ServingRole
from baton.planner.plan import Plan
from baton.planner.policy import Planner
from loadtest.planner.cluster import Cluster
from loadtest.planner.ring import DecodeWorker

SYNC_S = 15.0
WINDOW_S = 60.0
LENGTHS_S = 300.0


class Scaler(Protocol):
    def sync(self, cluster: Cluster) -> None:
        """Scale the cluster; called every ``SYNC_S``."""


# --- HorizontalPodAutoscalers


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """A behaviour of autoscaling/v2: pods, or a share of the pods, in a period. The greater of both is
    allowed."""

    up_pods: int
    up_share: float
    up_s: float
    down_pods: int
    down_share: float
    down_s: float
    settle_s: float = 300.0


CHART = Behavior(up_pods=1, up_share=0.0, up_s=60.0, down_pods=1, down_share=0.0, down_s=300.0)
"""The behaviour that the chart sets."""
KUBERNETES = Behavior(up_pods=4, up_share=1.0, up_s=15.0, down_pods=0, down_share=1.0, down_s=15.0)
"""Kubernetes' behaviour when none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaSetting:
    """The settings of one autoscaler."""

    target: float
    """The metric's target, per pod."""
    least: int
    most: int
    behavior: Behavior


class Hpa:
    """The controller's arithmetic for an External metric with an AverageValue."""

    TOLERANCE = 0.1

    def __init__(self, setting: HpaSetting) -> None:
        self._setting = setting
        self._told: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def desired(self, now: float, metric: float, replicas: int) -> int:
        setting, behavior = self._setting, self._setting.behavior
        ratio = metric / (setting.target * replicas)
        told = replicas if abs(ratio - 1) <= self.TOLERANCE else math.ceil(metric / setting.target)
        self._told.append((now, told))
        while self._told[0][0] < now - behavior.settle_s:
            self._told.popleft()
        settled = max(number for _, number in self._told)
        wanted = told if told > replicas else min(replicas, settled)
        wanted = max(self._lowest(now, replicas), min(self._highest(now, replicas), wanted))
        wanted = max(setting.least, min(setting.most, wanted))
        if wanted != replicas:
            self._changes.append((now, wanted - replicas))
        return wanted

    def _highest(self, now: float, replicas: int) -> int:
        behavior = self._setting.behavior
        began = replicas - sum(by for at, by in self._changes if by > 0 and at > now - behavior.up_s)
        return max(began + behavior.up_pods, math.ceil(began * (1 + behavior.up_share)), replicas)

    def _lowest(self, now: float, replicas: int) -> int:
        behavior = self._setting.behavior
        began = replicas - sum(by for at, by in self._changes if by < 0 and at > now - behavior.down_s)
        lowest = min(began - behavior.down_pods, math.floor(began * (1 - behavior.down_share)))
        return min(replicas, lowest)


class TwoHpas:
    """Two autoscalers: prefill by the seconds of its backlog, decode by the share of its KV blocks in use."""

    def __init__(self, prefill: HpaSetting, decode: HpaSetting) -> None:
        self._hpas: dict[ServingRole, Hpa] = {"prefill": Hpa(prefill), "decode": Hpa(decode)}

    def sync(self, cluster: Cluster) -> None:
        metrics: dict[ServingRole, float] = {
            "prefill": sum(worker.backlog_s for worker in cluster.prefills()),
            "decode": sum(1 - worker.spare / worker.room for worker in cluster.decodes()),
        }
        for role, hpa in self._hpas.items():
            replicas = hpa.desired(cluster.clock.now, metrics[role], cluster.replicas.of(role))
            cluster.scale(role, replicas)


# --- the planner


@dataclass(frozen=True, slots=True)
class _Look:
    """The counters' values at a moment."""

    at: float
    requests: int
    prompt_tokens: int
    prompt_squares: float
    answers: int
    answer_tokens: int
    answer_squares: float
    computed_tokens: int
    computing_s: float
    steps: float
    row_steps: float
    busy_s: float


class Shipped:
    """The planner's policy, with the figures that Prometheus would give it."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.plans: list[tuple[float, Plan]] = []
        self._looks: deque[_Look] = deque()
        self._gone = _Steps()

    def sync(self, cluster: Cluster) -> None:
        seen = self.measure(cluster)
        plan = self.planner.plan(seen)
        self.plans.append((cluster.clock.now, plan))
        for switch in plan.switches:
            cluster.switch(switch.to, switch.count)
        cluster.scale("prefill", plan.replicas.prefill)
        cluster.scale("decode", plan.replicas.decode)

    def measure(self, cluster: Cluster) -> Measured:
        now, counts = cluster.clock.now, cluster.ring.counts
        decodes = list(cluster.decodes())
        look = _Look(
            now,
            counts.requests,
            counts.prompt_tokens,
            counts.prompt_squares,
            counts.answers,
            counts.answer_tokens,
            counts.answer_squares,
            counts.computed_tokens,
            counts.computing_s,
            *self._gone.total(decodes),
        )
        self._looks.append(look)
        while self._looks[0].at < now - LENGTHS_S:
            self._looks.popleft()
        before = next(each for each in self._looks if each.at >= now - WINDOW_S)
        first = self._looks[0]
        window = max(SYNC_S, now - before.at)
        requests, answers = look.requests - first.requests, look.answers - first.answers
        computing_s = look.computing_s - first.computing_s
        rate = (look.computed_tokens - first.computed_tokens) / computing_s if computing_s else 0.0
        backlog_s = sum(worker.backlog_s for worker in cluster.prefills())
        steps = look.steps - before.steps
        held = sum(worker.room - worker.spare for worker in decodes)
        running = sum(len(worker.jobs) + worker.coming for worker in decodes)
        paced = [worker.pace for worker in decodes if worker.pace.base_s]
        return Measured(
            at_s=now,
            age_s=SYNC_S / 2,
            arrivals=Arrivals(
                window_s=window,
                requests_per_s=(look.requests - before.requests) / window,
                prompt_tokens_per_s=(look.prompt_tokens - before.prompt_tokens) / window,
                prompt_spread=_spread(
                    requests,
                    look.prompt_tokens - first.prompt_tokens,
                    look.prompt_squares - first.prompt_squares,
                ),
                answer_tokens=(look.answer_tokens - first.answer_tokens) / answers if answers else 0.0,
                answer_spread=_spread(
                    answers,
                    look.answer_tokens - first.answer_tokens,
                    look.answer_squares - first.answer_squares,
                ),
            ),
            prefill=PrefillState(
                tokens_per_s=rate,
                waiting_tokens=cluster.ring.waiting_tokens + backlog_s * rate,
                before_s=0.01,
            ),
            decode=DecodeState(
                step_base_s=_mean([pace.base_s for pace in paced]),
                step_row_s=_mean([pace.row_s for pace in paced]),
                blocks=cluster.setting.room,
                blocks_held=held,
                running=running + len(cluster.ring.waiting),
                step_s=(look.busy_s - before.busy_s) / steps if steps else 0.0,
                step_rows=(look.row_steps - before.row_steps) / steps if steps else 0.0,
            ),
            fleet=cluster.fleet(),
        )


class _Steps:
    """Sums over workers that come and go, as ``rate`` computes them."""

    def __init__(self) -> None:
        self._last: dict[DecodeWorker, tuple[float, float, float]] = {}
        self._gone = (0.0, 0.0, 0.0)

    def total(self, workers: list[DecodeWorker]) -> tuple[float, float, float]:
        """Return steps, sequences in all steps, and seconds."""
        for worker in self._last.keys() - set(workers):
            steps, rows, seconds = self._last.pop(worker)
            self._gone = (self._gone[0] + steps, self._gone[1] + rows, self._gone[2] + seconds)
        self._last |= {worker: (worker.steps, worker.row_steps, worker.busy_s) for worker in workers}
        steps, rows, seconds = (sum(each) for each in zip(self._gone, *self._last.values(), strict=True))
        return steps, rows, seconds


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(number: int, total: float, squares: float) -> float:
    if number < 2 or not total:
        return 0.0
    mean = total / number
    return math.sqrt(max(0.0, squares / number - mean * mean)) / mean
