"""What a request leaves in the metrics: stages that sum to its time to first token, and targets missed."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.meter import Arrival, Meters, RequestMeter
from baton.router.dispatch.types import RequestTimings, RingError, deadline_exceeded
from baton.telemetry.goodput import GoodputTargets
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from baton.text.choice import Delta, FinishReason


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("baton.router.api.meter.time.perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Followed:
    """A request that is metered, with its timings through a ring."""

    def __init__(self, clock: Clock, targets: GoodputTargets = GoodputTargets(), choices: int = 1) -> None:  # noqa: B008
        self.clock = clock
        self.metrics = RouterMetrics(CollectorRegistry(), targets)
        model = ModelMetrics(self.metrics, "m")
        where = Meters(model, self.metrics.stages.of("router", "m"), self.metrics.goodput)
        came = clock.now
        clock.pass_by(0.25)
        arrival = Arrival(came, clock.now, 7)
        clock.pass_by(0.5)
        self.meter = RequestMeter(where, "/v1/completions", arrival, choices)
        self.timings = [RequestTimings() for _ in range(choices)]

    def run(self, gaps: list[float], *, placed: float = 1.0, begun: float = 2.0, last: bool = True) -> None:
        """One choice, whose tokens come ``gaps`` apart; the first 4 s after it was begun."""
        with self.meter as meter:
            meter.timings = self.timings
            self.clock.pass_by(placed)
            self.timings[0].placed = self.clock.now
            self.clock.pass_by(begun)
            self.timings[0].begun = self.clock.now
            self.clock.pass_by(4.0)
            meter.delivered(0, Delta("", (1,)))
            for number, gap in enumerate(gaps):
                self.clock.pass_by(gap)
                reason: FinishReason | None = "length" if last and number == len(gaps) - 1 else None
                meter.delivered(0, Delta("", (1,), reason))
            if not last:
                raise RingError(503, "worker_lost", "lost")

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model": "m", **labels})

    def outcome(self) -> dict[tuple[str, str], float]:
        return {
            (sample.labels["missed"], sample.labels["cause"]): sample.value
            for family in self.metrics.registry.collect()
            if family.name == "baton_slo_requests"
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }


def test_stages_sum_to_the_time_to_first_token(clock: Clock) -> None:
    followed = Followed(clock)
    followed.run([0.01, 0.01])
    name = "baton_request_stage_seconds_sum"
    stages = {
        stage: followed.value(name, role="router", stage=stage)
        for stage in ("prepare", "admission", "placement", "prefill_queue", "prefill")
    }
    expected = {"prepare": 0.25, "admission": 0.5, "placement": 1.0, "prefill_queue": 2.0, "prefill": 4.0}
    assert stages == pytest.approx(expected)
    assert followed.value("baton_time_to_first_token_seconds_sum") == pytest.approx(7.75)
    assert followed.value("baton_decode_seconds_sum") == pytest.approx(0.02)
    assert followed.value("baton_request_generated_tokens_sum") == 3
    assert followed.outcome() == {}  # nobody has targets


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (RingError(503, "worker_lost", "lost"), {("error", "worker_lost"): 1.0}),
        (RingError(500, "tokens_lost", "lost"), {("error", "tokens_lost"): 1.0}),
        (ValueError("a bug"), {("error", "internal_error"): 1.0}),
        (RingError(400, "invalid_value", "found by a worker"), {}),
        (deadline_exceeded(), {}),
        (GeneratorExit(), {}),
    ],
)
def test_what_a_client_is_at_fault_for_misses_no_target(
    clock: Clock, error: BaseException, counted: dict[tuple[str, str], float]
) -> None:
    followed = Followed(clock, GoodputTargets(ttft=10.0))
    with pytest.raises(type(error)), followed.meter:
        raise error
    assert followed.outcome() == counted


def test_what_a_ring_does_not_tell_is_in_the_last_stage(clock: Clock) -> None:
    followed = Followed(clock)
    with followed.meter as meter:
        clock.pass_by(3.0)
        meter.delivered(0, Delta("", (1,), "stop"))
    name = "baton_request_stage_seconds_sum"
    assert followed.value(name, role="router", stage="prefill") == pytest.approx(3.0)
    assert followed.value(name, role="router", stage="placement") == 0.0


@pytest.mark.parametrize(
    ("gaps", "where", "missed", "cause"),
    [
        ([0.01] * 5, {}, "none", ""),
        ([0.01] * 5, {"placed": 0.1, "begun": 30.0}, "ttft", "prefill_queue"),
        ([0.01] * 5, {"placed": 30.0}, "ttft", "placement"),
        ([0.3, *[0.01] * 5], {}, "itl", "handoff"),
        ([0.01, 0.3, 0.01], {}, "itl", "decode"),
        ([0.3, *[0.01] * 5], {"begun": 30.0}, "ttft", "prefill_queue"),
        ([*[0.01] * 120, 0.3], {}, "none", ""),  # one in a hundred may be late
        ([*[0.01] * 120, 0.3, 0.3], {}, "itl", "decode"),
    ],
)
def test_what_is_missed_and_why(
    clock: Clock, gaps: list[float], where: dict[str, float], missed: str, cause: str
) -> None:
    followed = Followed(clock, GoodputTargets(ttft=10.0, itl=0.1))
    followed.run(gaps, **where)  # type: ignore[arg-type]
    assert followed.outcome() == {(missed, cause): 1}


def test_an_attempt_that_was_lost_is_the_reason(clock: Clock) -> None:
    followed = Followed(clock, GoodputTargets(itl=0.1))
    followed.timings[0].interruptions = 1
    followed.run([0.01, 3.0, 0.01])
    assert followed.outcome() == {("itl", "resume"): 1}


def test_errors_miss_and_clients_that_leave_do_not_count(clock: Clock) -> None:
    failed = Followed(clock, GoodputTargets(ttft=60.0))
    with pytest.raises(RingError):
        failed.run([0.01], last=False)
    assert failed.outcome() == {("error", "worker_lost"): 1}
    left = Followed(clock, GoodputTargets(ttft=60.0))
    with pytest.raises(GeneratorExit), left.meter:
        raise GeneratorExit
    assert left.outcome() == {}
    assert left.value("baton_choices_total", endpoint="/v1/completions", finish_reason="cancelled") == 1


def test_targets_are_told() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry, GoodputTargets(ttft=0.5))
    assert registry.get_sample_value("baton_slo_target_seconds", {"target": "ttft"}) == 0.5
    assert registry.get_sample_value("baton_slo_target_seconds", {"target": "itl"}) is None
