"""The metrics of every token tell what prometheus_client's own would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from baton.telemetry.metrics import TOKEN_BUCKETS
from baton.telemetry.tally import TallyCounter, TallyHistogram

MODELS = ("demo", 'a "quoted" one')
SECONDS = st.one_of(st.sampled_from(TOKEN_BUCKETS), st.floats(0, 10), st.just(0.0))


def without_times_of_creation(page: bytes) -> list[str]:
    """No process of Baton tells them."""
    return [line for line in page.decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from(MODELS), SECONDS, st.integers(0, 5)), max_size=40))
def test_both_tell_the_same(observed: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TallyHistogram("gap_seconds", "Gaps.", TOKEN_BUCKETS, ours)
    tokens = TallyCounter("tokens", "Tokens.", ours)
    their_gaps = Histogram("gap_seconds", "Gaps.", ("model",), registry=theirs, buckets=TOKEN_BUCKETS)
    their_tokens = Counter("tokens", "Tokens.", ("model",), registry=theirs)
    for model, seconds, count in observed:
        gaps.labels(model).observe(seconds)
        their_gaps.labels(model).observe(seconds)
        tokens.labels(model).inc(count)
        their_tokens.labels(model).inc(count)
    for page in (generate_latest, generate_openmetrics):
        assert page(ours).decode().splitlines() == without_times_of_creation(page(theirs))


def test_a_model_without_tokens_yet_is_told_as_zero() -> None:
    registry = CollectorRegistry()
    TallyCounter("tokens", "Tokens.", registry).labels("demo")
    TallyHistogram("gap_seconds", "Gaps.", TOKEN_BUCKETS, registry).labels("demo")
    assert registry.get_sample_value("tokens_total", {"model": "demo"}) == 0
    assert registry.get_sample_value("gap_seconds_count", {"model": "demo"}) == 0


def test_names_are_taken_before_there_is_a_model() -> None:
    registry = CollectorRegistry()
    TallyCounter("tokens", "Tokens.", registry)
    TallyHistogram("gap_seconds", "Gaps.", TOKEN_BUCKETS, registry)
    for name in ("tokens", "gap_seconds"):
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            Counter(name, "Again.", registry=registry)
