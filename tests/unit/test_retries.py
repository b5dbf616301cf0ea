"""When a request is tried again, and which of them is blamed for the death of workers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.suspects import PAST, BlamedRequest, RetryState, Suspects

POLICY = RetryPolicy(
    queue_timeout=2.0, budget_share=0.2, budget_rate=5.0, budget_most=10.0, first_pause=0.1, max_pause=1.0
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def retries(policy: RetryPolicy = POLICY, seed: int = 1) -> tuple[Retries, Clock]:
    clock = Clock()
    return Retries(policy, random.Random(seed), clock), clock


def test_the_first_is_free_and_waits_only_until_all_is_known() -> None:
    tries, _ = retries(replace(POLICY, budget_most=0.0, budget_rate=0.01))
    for _ in range(1000):
        assert tries.pause_after(1, settle=True) == POLICY.settle
        assert tries.pause_after(1) == 0.0
    assert tries.pause_after(2) is None


def test_later_ones_wait_for_a_random_part_of_a_time_that_doubles() -> None:
    tries, clock = retries()
    for failures, most in ((2, 0.1), (3, 0.2), (4, 0.4), (5, 0.8), (6, 1.0), (60, 1.0)):
        pauses = []
        for _ in range(200):
            clock.now += 10  # the budget is no matter here
            pause = tries.pause_after(failures)
            assert pause is not None
            pauses.append(pause)
        assert 0 <= min(pauses) < most / 10
        assert most * 0.9 < max(pauses) <= most


def test_attempts_are_bounded() -> None:
    tries, _ = retries(replace(POLICY, max_attempts=3))
    assert [tries.exhausted(RetryState(in_vain=n)) for n in range(5)] == [False, False, False, True, True]


def test_an_outage_is_no_storm() -> None:
    """Whatever fails, later attempts are a share of the requests, a steady rate, and what was saved up."""
    tries, clock = retries()
    began, requests, again = clock.now, 0, 0
    for _ in range(2000):
        clock.now += 0.01
        tries.request_came()
        requests += 1
        while tries.pause_after(2) is not None:
            again += 1
    seconds = clock.now - began
    ahead = POLICY.budget_rate * POLICY.queue_timeout  # given to those who wait for it
    assert again <= POLICY.budget_most + 0.2 * requests + POLICY.budget_rate * seconds + ahead + 1
    assert again >= 0.2 * requests


def test_those_beyond_the_budget_wait_their_turn() -> None:
    tries, clock = retries(replace(POLICY, first_pause=0.0, budget_most=1.0))
    waits = [tries.pause_after(2) for _ in range(13)]
    assert waits[:4] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert waits[-1] is None, "longer than anybody waits for a worker"
    clock.now += 1.0
    assert tries.pause_after(2) is not None


def test_one_death_is_nobodys_fault_and_two_are() -> None:
    suspects, retry_state = Suspects(), RetryState()
    assert suspects.died([(retry_state, 5)], 0.0) == set()
    assert suspects.died([(retry_state, 5 + PAST - 1)], 0.0) == {retry_state}


def test_who_has_got_on_between_is_not_blamed() -> None:
    suspects, retry_state = Suspects(), RetryState()
    suspects.died([(retry_state, 5)], 0.0)
    assert suspects.died([(retry_state, 5 + PAST)], 0.0) == set()
    assert retry_state.deaths == 1


def test_where_others_die_too_it_may_be_chance() -> None:
    suspects, retry_state, other = Suspects(), RetryState(), RetryState()
    suspects.died([(retry_state, 0)], 100.0)
    suspects.died([(other, 0)], 110.0)
    assert suspects.died([(retry_state, 0)], 120.0) == set()
    assert retry_state.watched
    assert suspects.enter(retry_state)
    assert suspects.died([(retry_state, 0)], 130.0) == {retry_state}, "while it was watched"
    assert suspects.died([(other, 0)], 500.0) == {other}, "the others were long ago"


def test_answers_of_one_request_are_blamed_together() -> None:
    suspects, origin = Suspects(), BlamedRequest()
    forks = [RetryState(origin) for _ in range(3)]
    assert suspects.died([(each, 0) for each in forks], 0.0) == set()
    assert suspects.died([(each, 0) for each in forks], 0.0) == set(forks)


def test_of_several_one_runs_at_a_time_until_it_is_clear() -> None:
    suspects, one, other, beside = Suspects(), RetryState(), RetryState(), RetryState()
    for _ in range(2):
        assert suspects.died([(one, 0), (other, 0)], 0.0) == set()
    assert one.watched and other.watched
    assert suspects.enter(one)
    assert not suspects.enter(other)
    assert not one.got_to(PAST - 1)
    assert one.got_to(PAST) and suspects.leave(one)
    assert not one.watched
    assert suspects.enter(other)
    assert suspects.died([(one, PAST), (other, 0), (beside, 0)], 0.0) == {other}
    assert one.deaths == beside.deaths == 1


@pytest.mark.deep
@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.integers(0, 30))
def test_only_the_request_that_kills_is_given_up_on(
    data: st.DataObject, workers: int, neighbours: int, kills_at: int
) -> None:
    """It dies of its token ``kills_at``, wherever it is computed, and takes everything there along."""
    suspects = Suspects()
    killer = RetryState()
    tokens = {killer: 0} | {RetryState(): 0 for _ in range(neighbours)}
    at: dict[RetryState, int] = {}
    deaths, guilty = 0, set[RetryState]()
    for _ in range(600):
        for retry_state in tokens:
            waits = retry_state in at or (retry_state.watched and not suspects.enter(retry_state))
            if retry_state not in guilty and not waits:
                at[retry_state] = data.draw(st.integers(0, workers - 1)) if deaths < 3 else 0
        ready = sorted(at, key=list(tokens).index)
        if not ready or killer in guilty:
            break
        retry_state = data.draw(st.sampled_from(ready)) if deaths < 3 else ready[-1]
        if retry_state is killer and tokens[retry_state] == kills_at:
            there = [each for each in at if at[each] == at[killer]]
            guilty |= suspects.died([(each, tokens[each]) for each in there], 0.0)
            deaths += 1
            for each in there:
                del at[each]
        else:
            tokens[retry_state] += 1
            if retry_state.got_to(tokens[retry_state]):
                suspects.leave(retry_state)
    assert guilty <= {killer}
    assert deaths <= 3
