"""What ``baton bench`` computes: arrival times, percentiles, latencies, goodput, and how a sweep decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrivals import send_times
from baton.bench.goals import Goals, parse_goals
from baton.bench.record import RequestFailure, RequestRecord, TokenArrival
from baton.bench.spread import Spread
from baton.bench.summary import summarise
from baton.bench.sweep.candidate import Grid, RoleSplit, default_splits, parse_split
from baton.bench.sweep.halving import max_candidates, rounds_for
from baton.bench.sweep.plot import pareto
from baton.bench.sweep.search import RateSearch
from baton.process.options import ConfigError

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def record(
    *arrivals: tuple[float, int], sent: float = 0.0, failure: RequestFailure | None = None
) -> RequestRecord:
    """A request whose chunks came at these times, with so many tokens each."""
    chunks = tuple(TokenArrival(at, tokens) for at, tokens in arrivals)
    output = sum(tokens for _, tokens in arrivals)
    ended = arrivals[-1][0] if arrivals else 0.0
    return RequestRecord(
        0, sent, sent, ended, chunks, prompt_tokens=10, output_tokens=output, failure=failure
    )


class TestArrivals:
    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_have_the_mean_and_variance_of_the_gamma_distribution(self, burstiness: float) -> None:
        rate, count = 20.0, 40_000
        gaps = np.diff(send_times(count, rate, burstiness, seed=1))
        assert len(gaps) == count - 1
        assert gaps.min() >= 0
        assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
        assert gaps.var() == pytest.approx(1 / (rate**2 * burstiness), rel=0.1)

    def test_poisson_counts_are_as_spread_as_their_mean(self) -> None:
        times = send_times(50_000, 10.0, 1.0, seed=3)
        counts = np.bincount(np.floor(times).astype(int))[:-1]
        assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)

    def test_the_seed_decides(self) -> None:
        assert send_times(50, 5, 1, seed=1) == send_times(50, 5, 1, seed=1) != send_times(50, 5, 1, seed=2)

    def test_an_infinite_rate_is_all_at_once(self) -> None:
        assert send_times(3, math.inf, 1, seed=0) == [0, 0, 0]


@given(VALUES)
def test_spreads_are_numpys(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    expected = [np.mean(values), *np.percentile(values, [50, 90, 99]), max(values)]
    found = [spread.mean, spread.median, spread.p90, spread.p99, spread.maximum]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_nothing_has_no_spread() -> None:
    assert Spread.of([]) is None


class TestLatencies:
    def test_tokens_of_a_chunk_share_its_time(self) -> None:
        one = record((0.5, 1), (0.6, 1), (0.9, 3))
        assert one.ttft == 0.5
        assert one.itl == pytest.approx([0.1, 0.1, 0.1, 0.1])
        assert one.longest_gap == pytest.approx(0.3)

    def test_further_tokens_of_the_first_chunk_take_no_time(self) -> None:
        assert record((0.5, 3), (0.7, 1)).itl == pytest.approx([0, 0, 0.2])

    @given(st.lists(st.tuples(st.floats(0.001, 9), st.integers(1, 5)), min_size=1, max_size=20))
    def test_their_mean_is_the_tpot(self, gaps: list[tuple[float, int]]) -> None:
        times = np.cumsum([gap for gap, _ in gaps])
        one = record(*((float(at), tokens) for at, (_, tokens) in zip(times, gaps, strict=True)))
        assert len(one.itl) == one.output_tokens - 1
        if one.output_tokens > 1:
            assert np.mean(one.itl) == pytest.approx(one.tpot)
        else:
            assert one.tpot is None


class TestGoodput:
    GOALS = Goals(ttft=0.5, tpot=0.1)

    def test_counts_whole_answers_within_all_goals(self) -> None:
        late = record((0.6, 1), (0.65, 1), sent=1.0)
        slow = record((0.1, 1), (0.9, 1), sent=2.0)
        failed = record((0.1, 1), (0.15, 1), sent=3.0, failure=RequestFailure("timeout", ""))
        good = record((0.5, 1), (0.6, 1), sent=3.4)
        summary = summarise([late, slow, failed, good], self.GOALS)
        assert summary.duration == pytest.approx(4.0 - 1.0)
        assert summary.goodput is not None
        assert summary.goodput.requests_per_s == pytest.approx(1 / 3)
        assert summary.goodput.attainment == 0.25
        assert summary.errors == {"timeout": 1}
        assert summary.completed == 3
        assert summary.output_tokens_per_s == pytest.approx(6 / 3)
        assert summary.tokens_per_s == pytest.approx(36 / 3)

    @given(st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)), min_size=1, max_size=30))
    def test_is_what_numpy_counts(self, answers: list[tuple[float, float]]) -> None:
        records = [record((first, 1), (first + gap, 1)) for first, gap in answers]
        first = np.array([one.arrivals[0].at for one in records])
        last = np.array([one.arrivals[1].at for one in records])
        good = int(np.sum((first <= 0.5) & (last - first <= 0.1)))
        summary = summarise(records, self.GOALS)
        assert summary.goodput is not None
        assert summary.goodput.attainment == pytest.approx(good / len(records))

    def test_an_answer_of_one_token_has_no_tpot_to_miss(self) -> None:
        assert record((0.5, 1)).meets(self.GOALS)

    def test_an_itl_goal_is_of_the_requests_99th_percentile(self) -> None:
        steady = record(*((0.1 * n, 1) for n in range(1, 10)))
        stalled = record(*((0.1 * n, 1) for n in range(1, 10)), (2.0, 1))
        goals = Goals(itl=0.11)
        assert steady.meets(goals)
        assert not stalled.meets(goals)

    def test_is_left_out_without_goals(self) -> None:
        assert summarise([record((0.5, 1))], Goals()).goodput is None

    def test_goals_are_read_in_milliseconds(self) -> None:
        assert parse_goals("goodput", ["ttft:500 tpot:50,e2e:2e3"]) == Goals(ttft=0.5, tpot=0.05, e2e=2.0)

    @pytest.mark.parametrize("text", ["ttft", "ttft:0", "ttft:nan", "speed:3", "ttft:1 ttft:2", "ttft:inf"])
    def test_bad_goals_name_the_option(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--goodput: "):
            parse_goals("goodput", [text])


class TestSweep:
    @given(st.floats(0.1, 1000), st.floats(0.1, 1000))
    def test_the_search_closes_in_on_the_highest_rate(self, capacity: float, start: float) -> None:
        search = RateSearch(start)
        for _ in range(60):
            search.tell(search.rate, search.rate <= capacity)
        assert search.rate == pytest.approx(capacity, rel=0.01)

    def test_the_search_gets_over_a_wrong_miss(self) -> None:
        search = RateSearch(8.0)
        for number in range(60):
            search.tell(search.rate, search.rate <= 10 and number != 0)
        assert 5 < search.rate < 17

    @given(st.integers(1, 200))
    def test_rounds_shrink_to_one(self, candidates: int) -> None:
        rounds = rounds_for(candidates)
        counts = [one.candidates for one in rounds]
        assert counts[0] == candidates
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1
        assert [one.repeats for one in rounds] == [1] * (len(rounds) - 1) + [5]

    @given(st.integers(1, 100), st.floats(1, 7200))
    def test_no_more_candidates_than_the_time_allows(self, available: int, seconds: float) -> None:
        count = max_candidates(available, seconds, 30)
        assert 0 <= count <= available
        if count:
            rounds = rounds_for(count)
            assert sum(30 * one.slots for one in rounds) <= seconds
        if seconds >= 600:
            assert count >= 1

    def test_what_makes_no_sense_is_not_tried(self) -> None:
        grid = Grid([RoleSplit(1, 1), RoleSplit(both=2)], [16, 512], [256, 1024], [128, 512])
        found = grid.candidates(cores=4)
        assert len(found) == len(set(found)) == 2 * 5
        assert all(one.max_num_seqs <= one.max_num_batched_tokens >= one.prefill_chunk for one in found)
        assert {one.threads for one in found} == {2}

    def test_splits_stay_within_the_cores(self) -> None:
        assert default_splits(4) == [
            *(RoleSplit(1, 1), RoleSplit(1, 3), RoleSplit(2, 2), RoleSplit(3, 1)),
            *(RoleSplit(both=1), RoleSplit(both=4)),
        ]
        assert [parse_split("splits", str(split)) for split in default_splits(8)] == default_splits(8)

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
    def test_the_frontier_is_what_nothing_beats(self, points: list[tuple[float, float]]) -> None:
        unbeaten = {
            (x, y) for x, y in points if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
        }
        assert set(pareto(points)) == unbeaten
