"""What the start says about itself: seconds of each phase."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from baton import LLM
from baton.process.start_clock import OTHER, StartClock
from baton.telemetry.startup import StartCollector


class Clock:
    """Time goes by when it is told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_the_phases_and_all_else_sum_to_the_total() -> None:
    time = Clock()
    clock = StartClock(time)
    for name, seconds in (("config", 0.5), ("weights", 2.0), ("config", 0.25)):
        time.seconds += 0.125  # between phases
        with clock.phase(name):  # type: ignore[arg-type]
            time.seconds += seconds
    with pytest.raises(ValueError, match="broken"), clock.phase("pack"):
        time.seconds += 0.004
        raise ValueError("broken")
    times = clock.times()
    assert times.phases == pytest.approx({"config": 0.75, "weights": 2.0, "pack": 0.004, OTHER: 0.375})
    assert times.total == pytest.approx(sum(times.phases.values()))
    assert str(times) == "3.13 s (config 0.75, weights 2.00, other 0.38)"


def test_no_phase_within_another() -> None:
    clock = StartClock()
    with (
        pytest.raises(AssertionError, match="pool within weights"),
        clock.phase("weights"),
        clock.phase("pool"),
    ):
        pass


def test_the_metric_has_every_phase() -> None:
    time = Clock()
    clock = StartClock(time)
    with clock.phase("ranks"):
        time.seconds += 3.0
    time.seconds += 1.0
    registry = CollectorRegistry()
    registry.register(StartCollector("decode", clock.times()))
    samples = {
        (sample.name, sample.labels["role"], sample.labels["phase"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }
    assert samples == {
        ("baton_startup_seconds", "decode", "ranks"): 3.0,
        ("baton_startup_seconds", "decode", "other"): 1.0,
    }


def test_an_llm_tells_where_its_start_went(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="baton.engine.llm"):
        llm = LLM("demo", dtype="float32", num_blocks=64, speculative_method="draft", host_kv_bytes=1 << 24)
    times = llm.start_times
    parts = {"config", "kernels", "weights", "pack", "drafter", "pool", "warm_up", "host_tier"}
    assert parts < set(times.phases)
    assert min(times.phases.values()) >= 0
    assert sum(times.phases.values()) == pytest.approx(times.total)
    # Hardly anything is left unnamed.
    assert times.phases[OTHER] < 0.1 * times.total + 0.1
    [line] = [record.getMessage() for record in caplog.records if "ready after" in record.getMessage()]
    assert line == f"demo ready after {times}"
