"""Rings as a planner sees them, and one that does at once what a plan says."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.planner.goals import LatencyTargets, PlanBounds, Times
from baton.planner.measured import Arrivals, Counts, DecodeState, Measured, MeasuredFleet, PrefillState
from baton.planner.plan import Plan

TARGETS = LatencyTargets(ttft_s=2.0, itl_s=0.05, attainment=0.99)
TIMES = Times(start_s=120.0, switch_s=30.0, settle_s=120.0)
BOUNDS = PlanBounds(gpu_budget=24, max_prefill=16, max_decode=16)
PROMPT, ANSWER = 1000.0, 200.0
STEP_S = 15.0


def counts(prefill: int, decode: int) -> Counts:
    return Counts(prefill=prefill, decode=decode)


def fleet(ready: Counts, **others: Counts) -> MeasuredFleet:
    """Of workers at home, if nothing else is said."""
    parts = {"ready": ready, "switching": counts(0, 0), "replicas": ready, "strays": counts(0, 0)} | others
    return MeasuredFleet(**parts)


def sequences(tokens_per_s: float, workers: int) -> float:
    """Under way: as many as the steps below make of such a load, or as there is room for."""
    each = tokens_per_s / max(1, workers)
    return workers * min(100.0, each * 0.02 / max(0.01, 1 - each * 0.0002))


def measured(
    at_s: float,
    ring: MeasuredFleet,
    per_s: float,
    *,
    prompt: float = PROMPT,
    answer: float = ANSWER,
    age_s: float = 5.0,
    waiting_tokens: float = 0.0,
    running: float | None = None,
) -> Measured:
    """``per_s`` requests a second. A prefill worker computes 5,000 tokens a second, a decode step takes 20 ms
    and 0.2 ms for each sequence, of which a worker has room for 100 that are 1,200 tokens long."""
    there = sequences(per_s * answer, ring.ready.decode) if running is None else running
    return Measured(
        at_s=at_s,
        age_s=age_s,
        arrivals=Arrivals(
            window_s=60.0,
            requests_per_s=per_s,
            prompt_tokens_per_s=per_s * prompt,
            prompt_spread=0.7,
            answer_tokens=answer,
            answer_spread=0.7,
        ),
        prefill=PrefillState(tokens_per_s=5000.0, waiting_tokens=waiting_tokens),
        decode=DecodeState(
            step_base_s=0.02,
            step_row_s=0.0002,
            blocks=7500.0,
            blocks_held=there * (prompt + answer) / 16,
            running=there,
            step_s=0.0,
            step_rows=0.0,
        ),
        fleet=ring,
    )


@dataclass(slots=True)
class PromptRing:
    """Pods and switches take no time here."""

    replicas: Counts
    strays: Counts = field(default_factory=lambda: counts(0, 0))

    @property
    def fleet(self) -> MeasuredFleet:
        still = MeasuredFleet(
            ready=self.replicas, switching=counts(0, 0), replicas=self.replicas, strays=self.strays
        )
        return MeasuredFleet(
            ready=still.to_come, switching=counts(0, 0), replicas=self.replicas, strays=self.strays
        )

    def do(self, plan: Plan) -> None:
        self.replicas = plan.replicas
        for switch in plan.switches:
            prefill, decode = self.strays.prefill, self.strays.decode
            if switch.to == "prefill":
                home = min(decode, switch.count)
                self.strays = counts(prefill + switch.count - home, decode - home)
            else:
                home = min(prefill, switch.count)
                self.strays = counts(prefill - home, decode + switch.count - home)
