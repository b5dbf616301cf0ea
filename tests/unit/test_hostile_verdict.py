"""The judge of `loadtest.hostile`: what honest clients felt, and what of it is too much."""

from __future__ import annotations

import math

import msgspec
import pytest

from loadtest.hostile import verdict
from loadtest.hostile.catalogue import ATTACKS
from loadtest.hostile.honest import Probe, Recorded, Request
from loadtest.hostile.trials import TRIALS
from loadtest.hostile.verdict import Phases, Row
from loadtest.hostile.vocabulary import Felt, Found, Watched

PHASES = Phases(calm=100.0, attack=110.0, end=120.0)
FINE = Felt(
    itl_calm=0.02,
    itl=0.021,
    itl_most=0.04,
    ttft_calm=0.05,
    ttft=0.05,
    requests=40,
    silence_calm=0.01,
    silence=0.02,
    probes_failed=0,
    turn=math.nan,
    own_turn=math.nan,
)


def stream(sent_at: float, gap_s: float, count: int, *, ended: bool = True) -> Request:
    times = [sent_at + gap_s * (i + 1) for i in range(count)]
    return Request(tenant="acme", sent_at=sent_at, times=times, ended_at=times[-1] if ended else None)


def test_the_calm_and_the_attack_are_told_apart() -> None:
    recorded = Recorded(requests=[stream(100.5, 0.02, 100), stream(111.0, 0.05, 100)])
    felt = verdict.felt(recorded, PHASES)
    assert felt.itl_calm == pytest.approx(0.02)
    assert felt.itl == pytest.approx(0.05)
    assert felt.ratio == pytest.approx(2.5)
    assert felt.ttft_calm == pytest.approx(0.02)
    assert felt.ttft == pytest.approx(0.05)
    assert felt.requests == 1 and not felt.failed


def test_a_stream_that_falls_silent_counts_with_its_silence() -> None:
    """It has no later token to tell of it."""
    felt = verdict.felt(Recorded(requests=[stream(110.5, 0.02, 50, ended=False)]), PHASES)
    assert felt.itl_most == pytest.approx(120.0 - 111.5)
    assert felt.failed == {"not ended": 1}


def test_what_fails_under_attack_counts_though_it_began_before() -> None:
    broken = stream(109.0, 0.02, 60, ended=False)
    broken.failed = "broken off"
    felt = verdict.felt(Recorded(requests=[stream(101.0, 0.02, 9), broken]), PHASES)
    assert felt.failed == {"broken off": 1} and felt.requests == 1


def test_silence_is_that_of_the_probe_that_stays_connected() -> None:
    probes = [
        Probe(sent_at=105.0, took_s=0.01, fresh=False),
        Probe(sent_at=109.5, took_s=2.0, fresh=False),
        Probe(sent_at=112.0, took_s=0.02, fresh=False),
        Probe(sent_at=113.0, took_s=5.0, fresh=True, failed=True),
    ]
    felt = verdict.felt(Recorded(probes=probes), PHASES)
    assert (felt.silence, felt.probes_failed) == (2.0, 1)
    assert math.isnan(felt.itl) and verdict.broken(Watched(), felt, {}), "nothing measured is nothing held"


LAG = 'baton_router_event_loop_lag_seconds_bucket{le="%s"}'
LONGEST = "baton_router_event_loop_longest_turn_seconds"
OWN = "baton_router_event_loop_longest_own_turn_seconds"


def page(longest: float, **counts: int) -> dict[str, float]:
    bounds = ("0.01", "0.05", "0.5", "+Inf")
    told = {LAG % bound: float(counts.get(f"le{i}", 0)) for i, bound in enumerate(bounds)}
    return {**told, LONGEST: longest}


def test_the_longest_turn_is_the_routers_word() -> None:
    assert math.isnan(verdict.longest_turn({}, {"up": 1.0})), "an older router has no such metric"
    before = page(0.8, le0=5, le1=6, le2=6, le3=7)
    assert verdict.longest_turn(before, page(2.5, le0=9, le1=9, le2=9, le3=11)) == 2.5
    grown = page(0.8, le0=9, le1=12, le2=12, le3=13)
    assert verdict.longest_turn(before, grown) == 0.05, "what was longest came before the attack"


def test_a_turn_is_told_without_waits_for_a_processor_where_the_router_knows() -> None:
    before, after = page(0.8, le0=5), page(2.5, le0=5, le3=6)
    whole, own = verdict.max_turns(before, after)
    assert whole == 2.5 and math.isnan(own)
    assert verdict.max_turns(before, {**after, OWN: 0.02}) == (2.5, 0.02)
    grown = page(0.8, le0=9, le1=12, le2=12, le3=12)
    assert verdict.max_turns(before, {**grown, OWN: 0.4}).own == 0.05, "0.4 s came before the attack"


@pytest.mark.parametrize(
    ("watched", "felt", "said"),
    [
        ({}, {}, []),
        ({"whole_peak": 401.0}, {}, ["RSS 401 MiB"]),
        ({}, {"itl": 0.031}, ["ITL 1.6x"]),
        ({}, {"failed": {"HTTP 503": 2, "broken off": 1}}, ["3 honest requests failed"]),
        ({}, {"probes_failed": 1}, ["1 probes got no answer"]),
        ({}, {"silence": 0.3}, ["silent for 300 ms"]),
        ({}, {"silence": 0.3, "turn": 0.04}, []),
        ({}, {"turn": 0.06}, ["a turn of 60 ms"]),
        ({}, {"turn": 0.3, "own_turn": 0.04}, []),
        ({}, {"turn": 0.3, "own_turn": 0.07}, ["a turn of 70 ms"]),
        ({"ended": ["router"]}, {}, ["router ended"]),
    ],
)
def test_each_bound_is_held_or_named(
    watched: dict[str, object], felt: dict[str, object], said: list[str]
) -> None:
    found = verdict.broken(
        msgspec.structs.replace(Watched(), **watched), msgspec.structs.replace(FINE, **felt), {"400": 3}
    )
    assert found == said


@pytest.mark.parametrize(
    ("probe", "calm", "said"),
    [
        (0.04, 0.001, []),
        (0.3, 0.25, []),
        (0.3, 0.1, ["probes waited 300 ms, 100 ms in the calm"]),
        (math.nan, math.nan, ["probes waited nan ms, nan ms in the calm"]),
    ],
)
def test_beside_other_work_the_router_is_judged_by_the_calm(
    probe: float, calm: float, said: list[str]
) -> None:
    felt = msgspec.structs.replace(FINE, turn=0.5, own_turn=0.4, silence=9.0, probe=probe, probe_calm=calm)
    assert verdict.broken(Watched(), felt, {}, beside=True) == said


def test_what_loads_the_workers_is_not_judged_by_the_time_between_tokens() -> None:
    felt = msgspec.structs.replace(FINE, itl=1.0)
    assert verdict.broken(Watched(), felt, {}, loads=True) == []
    assert verdict.broken(Watched(), felt, {}) == ["ITL 50.0x"]


def test_rounds_are_judged_together() -> None:
    one = Recorded(requests=[stream(100.5, 0.02, 100), stream(111.0, 0.02, 100)])
    other = Recorded(requests=[stream(100.5, 0.03, 100), stream(111.0, 0.06, 100)])
    times = verdict.samples(one, PHASES)
    times.add(verdict.samples(other, PHASES))
    rounds = [
        verdict.felt(each, PHASES, verdict.Turns(0.1, own)) for each, own in ((one, 0.01), (other, 0.02))
    ]
    felt = verdict.all_felt(rounds, times)
    assert felt.itl_calm == pytest.approx(0.03)
    assert felt.itl == pytest.approx(0.06)
    assert (felt.requests, felt.own_turn) == (2, 0.02)
    watched = verdict.all_watched([Watched(rss_peak=5.0, ended=["decode"]), Watched(rss_peak=3.0)])
    assert (watched.rss_peak, watched.ended) == (5.0, ["decode"])


def test_an_attacker_gets_no_500() -> None:
    assert verdict.broken(Watched(), FINE, {"400": 1, "500": 2}) == ["2 answers of 500"]


def row(name: str, *, worked: bool, broken: tuple[str, ...] = (), skipped: str = "") -> Row:
    return Row(
        name=name,
        finding="S1",
        aim="",
        worked=worked,
        broken=list(broken),
        skipped=skipped,
        found=Found(),
    )


def test_all_must_hold_or_all_findings_must_work() -> None:
    shown = {"finding": True, "other": False}
    held = [row("finding", worked=False), row("other", worked=False)]
    reached = [row("finding", worked=True), row("other", worked=False)]
    slow = [row("finding", worked=False, broken=("ITL 2.0x",))]
    absent = [row("finding", worked=False, skipped="redis-server is not installed")]
    for rows, holds, broken in ((held, True, False), (reached, False, True), (slow, False, False)):
        assert verdict.verdict(rows, shown, expect_broken=False) is holds
        assert verdict.verdict(rows, shown, expect_broken=True) is broken
    for expect_broken in (False, True):
        assert verdict.verdict(absent, shown, expect_broken=expect_broken)


def test_every_finding_has_an_attack() -> None:
    """S1 to S19, each by at least one that was shown to work."""
    driven = {attack.finding for attack in ATTACKS.values() if attack.shown}
    driven |= {trial.finding for trial in TRIALS.values() if trial.shown}
    assert driven == {f"S{number}" for number in range(1, 20)}
    assert not set(ATTACKS) & set(TRIALS)
