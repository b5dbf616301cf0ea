"""What the planner never does, whatever it is told."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from baton.planner.goals import LatencyTargets, PlanBounds
from baton.planner.measured import Counts, MeasuredFleet
from baton.planner.plan import Plan
from baton.planner.policy import Planner
from baton.planner.queueing import DecodeLoad, PrefillLoad
from baton.planner.sizing import Demand, ServiceEstimate, smallest
from tests.support.planning import BOUNDS, STEP_S, TARGETS, TIMES, PromptRing, counts, fleet, measured

few = st.integers(1, 8)
loads = st.floats(0.0, 60.0)


@st.composite
def bounds(draw: st.DrawFn) -> PlanBounds:
    min_p, min_d, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    fewest = gpus * (min_p + min_d)
    return PlanBounds(
        gpu_budget=fewest + draw(st.integers(0, 20)),
        prefill_gpus=gpus,
        decode_gpus=gpus,
        min_prefill=min_p,
        max_prefill=min_p + draw(st.integers(0, 10)),
        min_decode=min_d,
        max_decode=min_d + draw(st.integers(0, 10)),
    )


@st.composite
def fleets(draw: st.DrawFn) -> MeasuredFleet:
    """Some pods are still to come; of those that are there some serve away from home."""
    replicas = counts(draw(few), draw(few))
    ready = counts(draw(st.integers(0, replicas.prefill)), draw(st.integers(1, replicas.decode)))
    away = counts(0, draw(st.integers(0, ready.prefill)))
    across = Counts(prefill=ready.prefill - away.decode, decode=ready.decode + away.decode)
    unable = counts(draw(st.integers(0, across.prefill)), draw(st.integers(0, across.decode)))
    return fleet(across, replicas=replicas, strays=away, unable=unable)


@given(bounds(), st.lists(st.tuples(fleets(), loads, st.floats(0, 1e5)), min_size=1, max_size=6))
def test_plans_stay_within_bounds(
    limits: PlanBounds, looks: list[tuple[MeasuredFleet, float, float]]
) -> None:
    planner = Planner(TARGETS, limits, TIMES)
    for number, (ring, per_s, waiting) in enumerate(looks):
        plan = planner.plan(measured(number * STEP_S, ring, per_s, waiting_tokens=waiting))
        if plan.held:
            assert not plan.acts(ring.replicas)
            continue
        assert limits.allow(plan.wanted)
        assert min(plan.replicas.prefill, plan.replicas.decode) >= 0
        gpus = limits.gpus(plan.replicas)
        assert gpus <= max(limits.gpu_budget, limits.gpus(ring.replicas))
        check_switches(plan, ring, limits)


def check_switches(plan: Plan, ring: MeasuredFleet, limits: PlanBounds) -> None:
    """Some are left of the role that is switched from: the fewest that there must be, and who cannot."""
    for switch in plan.switches:
        if switch.to == "prefill":
            left, least = ring.ready.decode - switch.count, max(limits.min_decode, ring.unable.decode)
        else:
            left, least = ring.ready.prefill - switch.count, max(limits.min_prefill, ring.unable.prefill)
        assert switch.count >= 1
        assert left >= max(1, least)


@given(st.floats(0.1, 20.0), few, few, st.floats(300, 4000), st.floats(10, 600))
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_a_constant_load_is_left_in_peace(
    per_s: float, prefill: int, decode: int, prompt: float, answer: float
) -> None:
    """Fewer may do as forecasts turn out to be right; nothing that was let go is asked for again."""
    limits = PlanBounds(gpu_budget=16, max_prefill=8, max_decode=8)
    planner, ring = Planner(TARGETS, limits, TIMES), PromptRing(counts(prefill, decode))
    pods = []
    for number in range(100):
        plan = planner.plan(measured(number * STEP_S, ring.fleet, per_s, prompt=prompt, answer=answer))
        ring.do(plan)
        pods.append(ring.replicas.total)
        assert ring.fleet.ready == plan.wanted
    assert pods[1:] == sorted(pods[1:], reverse=True)


@given(st.sampled_from(["age", "nan", "nobody"]), loads, fleets())
def test_without_good_figures_nothing_is_done(lack: str, per_s: float, ring: MeasuredFleet) -> None:
    planner = Planner(TARGETS, BOUNDS, TIMES)
    planner.plan(measured(0.0, ring, per_s))
    seen = measured(STEP_S, ring, 50.0, age_s=61.0 if lack == "age" else 5.0)
    if lack == "nan":
        seen = replace(seen, arrivals=replace(seen.arrivals, requests_per_s=float("nan")))
    if lack == "nobody":
        seen = replace(seen, fleet=replace(ring, ready=counts(0, 0)))
    plan = planner.plan(seen)
    assert plan.held
    assert not plan.acts(seen.fleet.replicas)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    return Demand(
        prefill=PrefillLoad(
            requests_per_s=draw(st.floats(0.1, 50)),
            tokens_per_s=draw(st.floats(10, 50_000)),
            spread=draw(st.floats(0, 2)),
            worker_tokens_per_s=draw(st.floats(1000, 20_000)),
        ),
        decode=DecodeLoad(
            tokens_per_s=draw(st.floats(1, 20_000)),
            base_s=draw(st.floats(0.001, 0.2)),
            row_s=draw(st.floats(0, 0.002)),
            rows_by_room=draw(st.floats(2, 300)),
            burstiness=draw(st.floats(1, 16)),
            stretch=draw(st.floats(1, 2)),
            crowding=draw(st.floats(1, 2)),
        ),
        before_s=draw(st.floats(0, 1)),
    )


@given(demands(), st.integers(1, 30))
def test_more_workers_never_make_more_late(demand: Demand, workers: int) -> None:
    prefill, decode = demand.prefill, demand.decode
    assert prefill.late(workers + 1, 2.0) <= prefill.late(workers, 2.0) + 1e-9
    assert decode.late(workers + 1, 0.05) <= decode.late(workers, 0.05) + 1e-9
    assert 0 <= prefill.late(workers, 2.0) <= 1
    assert 0 <= decode.late(workers, 0.05) <= 1


@given(demands(), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_more_load_never_needs_fewer(demand: Demand, prompts: float, answers: float) -> None:
    more = replace(
        demand,
        prefill=replace(
            demand.prefill,
            requests_per_s=demand.prefill.requests_per_s * prompts,
            tokens_per_s=demand.prefill.tokens_per_s * prompts,
        ),
        decode=replace(demand.decode, tokens_per_s=demand.decode.tokens_per_s * answers),
    )
    wide = PlanBounds(gpu_budget=60, max_prefill=30, max_decode=30)
    before, after = (smallest(ServiceEstimate(each, TARGETS), TARGETS, wide) for each in (demand, more))
    allowed = 1 - TARGETS.attainment
    if before.late <= allowed and after.late <= allowed:
        assert wide.gpus(after.workers) >= wide.gpus(before.workers)
    assert not (after.late <= allowed < before.late)


@given(demands(), st.floats(0.5, 0.999))
def test_the_choice_is_the_cheapest_that_is_good_enough(demand: Demand, attainment: float) -> None:
    targets = LatencyTargets(ttft_s=2.0, itl_s=0.05, attainment=attainment)
    small = PlanBounds(gpu_budget=9, max_prefill=7, max_decode=7)
    estimate = ServiceEstimate(demand, targets)
    chosen = smallest(estimate, targets, small)
    every = [
        estimate.size(counts(p, d)) for p in range(1, 8) for d in range(1, 8) if small.allow(counts(p, d))
    ]
    good = [each for each in every if each.late <= 1 - targets.attainment]
    if good:
        assert chosen.late <= 1 - targets.attainment
        assert small.gpus(chosen.workers) == min(small.gpus(each.workers) for each in good)
    else:
        assert chosen.late <= min(each.late for each in every) + 2e-3
