"""The planner's arithmetic, and what it decides in plain cases."""

from __future__ import annotations

import heapq
import math
import random
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.planner.config import PlannerConfig
from baton.planner.demand import Headroom
from baton.planner.forecast import Forecast
from baton.planner.goals import LatencyTargets, PlanBounds
from baton.planner.plan import Switch
from baton.planner.policy import Planner
from baton.planner.queries import spread
from baton.planner.queueing import DecodeLoad, PrefillLoad, wait_probability
from baton.process.options import ConfigError
from baton.telemetry.metrics import LENGTH_BUCKETS
from baton.telemetry.planner import PlannerMetrics
from tests.support.metric_docs import described, exported
from tests.support.planning import BOUNDS, STEP_S, TARGETS, TIMES, counts, fleet, measured

GIVEN = {
    "prometheus_url": "http://prometheus:9090",
    "ttft_target_ms": 2000.0,
    "itl_target_ms": 50.0,
    "gpu_budget": 8,
    "cluster_key": "a cluster key of tests",
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prometheus_url": "prometheus:9090"}, "--prometheus-url: must be http:// or https:// with a host"),
        ({"ttft_target_ms": 0.0}, "--ttft-target-ms: must be more than 0, not 0"),
        ({"itl_target_ms": -1.0}, "--itl-target-ms: must be more than 0, not -1"),
        ({"attainment": 1.0}, "--attainment: must be at most 0.9999"),
        ({"gpu_budget": 1}, "--gpu-budget: 1 is less than the 2 GPUs"),
        ({"prefill_gpus": 4, "decode_gpus": 8}, "--gpu-budget: 8 is less than the 12 GPUs"),
        ({"min_decode": 5, "max_decode": 4}, "--min-decode: 5 is more than max_decode, 4"),
        ({"max_prefill": 5000}, "--max-prefill: must be at most 1024, not 5000"),
        ({"min_prefill": 0}, "--min-prefill: must be at least 1, not 0"),
        ({"start_seconds": 0.0}, "--start-seconds: must be more than 0"),
        ({"interval": 0.1}, "--interval: must be at least 1"),
        ({"prometheus_selector": " "}, "--prometheus-selector: must be label matchers"),
        ({"decode_deployment": ""}, "--decode-deployment: must not be empty"),
        ({"worker_tls_certfile": "a"}, "--worker-tls-"),
        ({"cluster_key": ""}, "--cluster-key: must have at least 16 bytes, as workers switch for no other"),
    ],
)
def test_a_wrong_option_is_refused_by_name(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        PlannerConfig(**{**GIVEN, **changed})  # type: ignore[arg-type]


def test_what_is_exported_is_what_is_documented() -> None:
    registry = CollectorRegistry()
    PlannerMetrics(registry)
    page = exported(generate_latest(registry).decode())
    ours = {name: each for name, each in described().items() if each.where == {"planner"}}
    types = {name: kind for name, kind in page.types.items() if not name.endswith("_created")}
    assert types == {name: each.type for name, each in ours.items()}
    for name in types.keys() & page.labels.keys():
        assert page.labels[name] == ours[name].labels


@pytest.mark.parametrize(("servers", "busy", "waits"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092)])
def test_erlang(servers: int, busy: float, waits: float) -> None:
    assert wait_probability(servers, busy) == pytest.approx(waits, abs=1e-4)


@pytest.mark.parametrize(("workers", "per_s", "spread"), [(1, 2.0, 0.7), (4, 13.0, 0.8), (8, 28.0, 0.5)])
def test_the_estimate_of_late_prompts_is_near_a_simulation(workers: int, per_s: float, spread: float) -> None:
    """Prompts of 250 ms in the mean, in one queue before all workers."""
    draw, sigma = random.Random(workers), math.sqrt(math.log1p(spread**2))
    free, now, late, number = [0.0] * workers, 0.0, 0, 40_000
    for _ in range(number):
        now += draw.expovariate(per_s)
        begins = max(now, heapq.heappop(free))
        ends = begins + 0.25 * draw.lognormvariate(-(sigma**2) / 2, sigma)
        heapq.heappush(free, ends)
        late += ends - now > 1.0
    load = PrefillLoad(
        requests_per_s=per_s,
        tokens_per_s=per_s * 1000,
        spread=spread,
        worker_tokens_per_s=4000.0,
    )
    assert 0.5 * late / number - 0.005 < load.late(workers, 1.0) < 2 * late / number + 0.005


def test_a_load_next_to_nothing_is_not_late() -> None:
    load = PrefillLoad(requests_per_s=2.0, tokens_per_s=5e-324, spread=0.7, worker_tokens_per_s=1.0)
    assert load.late(1, 1.0) == 0.0


def test_sequences_and_steps_agree() -> None:
    load = DecodeLoad(tokens_per_s=4000.0, base_s=0.02, row_s=0.0002, rows_by_room=1000.0, burstiness=1.0)
    each = load.rows(2) / 2
    assert each / (0.02 + each * 0.0002) == pytest.approx(2000.0)
    assert load.max_rows(0.05) == pytest.approx(150.0)
    assert (
        DecodeLoad(tokens_per_s=6000.0, base_s=0.02, row_s=0.0002, rows_by_room=1000.0, burstiness=1.0).rows(
            1
        )
        == math.inf
    )


def test_a_forecast_follows_a_ramp_and_learns_how_wrong_it_was() -> None:
    forecast = Forecast(horizon_s=120.0)
    for number in range(240):
        forecast.see(number * STEP_S, 10.0 + 0.01 * number * STEP_S)
    assert forecast.then == pytest.approx(forecast.now + 1.2, rel=0.05)
    assert forecast.error < 0.1
    at_s, before = 240 * STEP_S, forecast.error
    for number in range(12):
        forecast.see(at_s + number * STEP_S, 80.0, jump=10.0)
    assert forecast.now == pytest.approx(80.0, rel=0.1)
    assert forecast.error > before


def test_a_load_that_only_wavers_is_not_taken_for_a_trend() -> None:
    draw = random.Random(1)
    forecast = Forecast(horizon_s=600.0)
    for number in range(960):  # four hours; another rate each minute
        if number % 4 == 0:
            rate = 10.0 * math.exp(draw.gauss(0, 0.12))
        forecast.see(number * STEP_S, rate, jump=2.0)
        if number > 240:
            assert forecast.then == pytest.approx(forecast.now, rel=0.1)


def test_a_quiet_hour_says_little_of_bursts_that_there_were() -> None:
    forecast = Forecast(horizon_s=120.0)
    for number in range(960):  # four hours with ten minutes of twice the load in each
        forecast.see(number * STEP_S, 20.0 if number % 240 < 40 else 10.0, jump=3.0)
    before = forecast.error
    for number in range(960, 1200):
        forecast.see(number * STEP_S, 10.0, jump=3.0)
    assert 0.85 * before < forecast.error < before


def test_a_load_that_rose_while_nobody_looked_was_not_forecast_wrong() -> None:
    asked = planner()
    for number in range(100):
        asked.plan(measured(number * STEP_S, fleet(counts(4, 4)), 8.0))
    before = asked.load.headroom
    plan = asked.plan(measured(100 * STEP_S + 3600.0, fleet(counts(4, 4)), 12.0))
    assert asked.load.headroom == before
    assert plan.wanted.total <= planner().plan(measured(0.0, fleet(counts(4, 4)), 12.0)).wanted.total


def test_the_spread_of_lengths_comes_from_their_buckets() -> None:
    draw = random.Random(1)
    lengths = [draw.lognormvariate(6.5, 0.8) for _ in range(20_000)]
    bounds = [*LENGTH_BUCKETS, math.inf]
    buckets = {str(bound): float(sum(each <= bound for each in lengths)) for bound in bounds}
    mean = sum(lengths) / len(lengths)
    true = math.sqrt(sum((each - mean) ** 2 for each in lengths) / len(lengths)) / mean
    assert spread(buckets) == pytest.approx(true, rel=0.15)
    assert spread({}) == 0.0


def planner(bounds: PlanBounds = BOUNDS, *, switches: bool = True) -> Planner:
    return Planner(TARGETS, bounds, TIMES, switches=switches)


def test_a_full_budget_is_turned_over_to_the_role_that_lacks() -> None:
    six = PlanBounds(gpu_budget=6)
    plan = planner(six).plan(measured(0.0, fleet(counts(2, 4)), 12.0))
    assert plan.switches == (Switch(to="prefill", count=1),) or plan.switches[0].count > 1
    assert plan.replicas == counts(2, 4)
    assert planner(six, switches=False).plan(measured(0.0, fleet(counts(2, 4)), 12.0)).switches == ()


def test_a_switch_brings_what_is_lacking_now_and_the_new_pod_comes_where_it_was_taken() -> None:
    plan = planner().plan(measured(0.0, fleet(counts(2, 3)), 11.0))
    assert [switch.to for switch in plan.switches] == ["prefill"]
    assert plan.replicas.total >= plan.wanted.total >= 5


def test_what_no_worker_can_turn_over_is_turned_over_by_pods() -> None:
    six = PlanBounds(gpu_budget=6)
    stuck = fleet(counts(2, 4), unable=counts(0, 4))
    plan = planner(six).plan(measured(0.0, stuck, 12.0))
    assert plan.switches == ()
    assert plan.replicas == planner(six, switches=False).plan(measured(0.0, stuck, 12.0)).replicas
    assert plan.replicas != stuck.replicas
    some = planner(six).plan(measured(0.0, fleet(counts(2, 4), unable=counts(0, 3)), 12.0))
    assert some.switches == (Switch(to="prefill", count=1),)


def test_pods_of_other_sizes_do_not_change_roles() -> None:
    uneven = PlanBounds(gpu_budget=12, prefill_gpus=1, decode_gpus=2)
    assert planner(uneven).plan(measured(0.0, fleet(counts(2, 4)), 12.0)).switches == ()


def test_fewer_are_asked_for_only_when_that_has_settled() -> None:
    asked = planner()
    assert asked.plan(measured(0.0, fleet(counts(6, 6)), 20.0)).replicas.total >= 8
    replicas = [asked.plan(measured(at, fleet(counts(6, 6)), 1.0)).replicas.total for at in (15.0, 60.0)]
    assert replicas == [12, 12]
    for number in range(5, 60):
        plan = asked.plan(measured(number * STEP_S, fleet(counts(6, 6)), 1.0))
    assert plan.replicas.total < 12
    assert "scale" in plan.reasons[0]


def test_what_is_under_way_keeps_its_workers() -> None:
    asked = planner()
    for number in range(60):
        plan = asked.plan(measured(number * STEP_S, fleet(counts(2, 6)), 0.1, running=450.0))
    assert plan.wanted.decode >= 5


def test_up_to_nine_in_ten_nothing_is_kept_for_bursts() -> None:
    assert Headroom.of(0.5) == Headroom.of(0.9) == Headroom(0.0, 0.0)
    kept = [Headroom.of(attainment) for attainment in (0.9, 0.95, 0.98, 0.99, 0.998, 0.9999)]
    assert kept == sorted(kept) and len(set(kept)) == len(kept)
    assert kept[-2] == pytest.approx((3.0, 5.0), abs=0.001)


def test_who_is_to_meet_more_has_more_workers_before_the_next_burst() -> None:
    wanted = []
    for attainment in (0.9, 0.97, 0.998):
        targets = LatencyTargets(ttft_s=TARGETS.ttft_s, itl_s=TARGETS.itl_s, attainment=attainment)
        asked = Planner(targets, BOUNDS, TIMES)
        for number in range(200):  # a burst of 150 s every 15 minutes, the last one 12 minutes ago
            load = 12.0 if number % 60 in range(10) else 6.0
            plan = asked.plan(measured(number * STEP_S, fleet(counts(4, 4)), load))
        wanted.append(plan.wanted.total)
    assert wanted[0] < wanted[1] < wanted[2]


def test_a_backlog_asks_for_more_than_the_load_does() -> None:
    ring = fleet(counts(2, 2))
    calm = planner().plan(measured(0.0, ring, 4.0))
    behind = planner().plan(measured(0.0, ring, 4.0, waiting_tokens=500_000.0))
    assert behind.wanted.prefill > calm.wanted.prefill


def test_a_target_that_no_number_of_workers_meets_is_said_and_does_not_eat_the_budget() -> None:
    targets = type(TARGETS)(ttft_s=2.0, itl_s=0.01)
    plan = Planner(targets, BOUNDS, TIMES).plan(measured(0.0, fleet(counts(2, 2)), 4.0))
    assert not plan.attainable
    assert plan.wanted.decode <= 3
    assert "no number of workers helps" in plan.reasons[-1]


def test_more_than_the_budget_is_asked_for_as_well_as_it_can_be() -> None:
    plan = planner(PlanBounds(gpu_budget=6)).plan(measured(0.0, fleet(counts(2, 2)), 60.0))
    assert not plan.attainable
    assert plan.wanted.total == 6
    assert "nothing within the bounds is enough" in " ".join(plan.reasons)


def test_before_the_first_request_it_says_what_it_waits_for() -> None:
    plan = planner().plan(measured(0.0, fleet(counts(1, 1)), 0.0, answer=0.0))
    assert plan.held in ("no answer has ended yet", "no decode worker has told how fast it is yet")
    assert plan.replicas == counts(1, 1)
