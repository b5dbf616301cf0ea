"""The arithmetic of limits: windows, shares, reservations, and what clients are told."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.router.api.admission import limit_headers, refusal
from baton.router.shared.breaker import MAX_PAUSE_S, TIMEOUTS, Breaker
from baton.router.shared.limits import BUCKET_MS, DAY_MS, WINDOW_MS, Limits, Tenant, bucket_of
from baton.router.shared.windows import Account, Window

NOW = 1_800_000_000_123
LIMITS = Limits(requests_per_minute=10, tokens_per_minute=1000)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), max_size=200), st.integers(40, 200))
def test_no_minute_has_more_than_its_limit_and_waiting_as_told_is_enough(
    steps: list[tuple[int, int]], limit: int
) -> None:
    window, now = Window(), NOW
    admitted: list[tuple[int, int]] = []
    for pause, amount in steps:
        now += pause
        wait = window.wait_ms(amount, limit, now)
        if wait == 0:
            window.add(bucket_of(now), amount)
            admitted.append((now, amount))
        else:
            for at, enough in ((now + wait - 1, False), (now + wait, True)):  # on copies: they forget
                later = Window()
                later.buckets = dict(window.buckets)
                assert (later.wait_ms(amount, limit, at) == 0) is enough
    for end, _ in admitted:
        assert sum(amount for at, amount in admitted if end - WINDOW_MS < at <= end) <= limit


def test_a_window_under_pressure_gives_all_but_one_bucket_of_its_limit() -> None:
    window, draw = Window(), random.Random(0)
    admitted = []
    for at in range(NOW, NOW + 5 * WINDOW_MS, 7):
        now = at + draw.randrange(3)
        if window.wait_ms(1, 1200, now) == 0:
            window.add(bucket_of(now), 1)
            admitted.append(now)
    last_minutes = [at for at in admitted if at >= NOW + WINDOW_MS]
    assert len(last_minutes) >= 4 * 1200 * WINDOW_MS / (WINDOW_MS + BUCKET_MS) - 1


def test_what_can_never_fit_is_told_so() -> None:
    assert Window().wait_ms(11, 10, NOW) == -1
    account = Account()
    decision = account.decide(LIMITS, 1001, 1, NOW)
    assert (decision.refused_by, decision.wait_ms) == ("tokens", -1)
    error = refusal(Tenant("acme", LIMITS), decision, 1001)
    assert error.status == 429 and "retry-after" not in error.headers
    assert error.message == "The request needs 1001 tokens, and the limit of acme is 1000 tokens per minute."


def test_what_can_never_fit_names_the_limit_that_is_too_small() -> None:
    account, limits = Account(), Limits(requests_per_minute=1, tokens_per_minute=50, tokens_per_day=100)
    account.count("l", bucket_of(NOW), 10, NOW)
    for tokens, measure, wait in ((1, "requests", 60_127), (51, "tokens", -1), (101, "tokens", -1)):
        decision = account.decide(limits, tokens, 1, NOW)
        assert (decision.refused_by, decision.wait_ms) == (measure, wait)
    limits = Limits(requests_per_minute=1, tokens_per_day=100)
    for replicas in (1, 3):
        decision = account.decide(limits, 101, replicas, NOW)
        assert (decision.refused_by, decision.wait_ms) == ("quota", -1), "not tomorrow either"
    error = refusal(Tenant("acme", limits), decision, 101)
    assert error.code == "request_too_large" and "retry-after" not in error.headers
    assert error.message == "The request needs 101 tokens, and the limit of acme is 100 tokens per day."


def test_what_was_reserved_and_not_used_comes_back() -> None:
    account = Account()
    assert account.decide(LIMITS, 900, 1, NOW).refused_by is None
    account.count("l", bucket_of(NOW), 900, NOW)
    assert account.decide(LIMITS, 200, 1, NOW).refused_by == "tokens"
    account.settle("l", bucket_of(NOW), 100 - 900, NOW)
    assert account.decide(LIMITS, 900, 1, NOW).refused_by is None
    account.settle("l", bucket_of(NOW), -10_000, NOW)
    assert account.tokens.total(NOW) == 0, "never below nothing"


def test_what_nobody_asks_for_is_kept_for_a_minute_only() -> None:
    account, limits = Account(), Limits(concurrent=1)
    for now in range(NOW, NOW + 10 * WINDOW_MS, BUCKET_MS):
        assert account.decide(limits, 10, 1, now).refused_by is None
        account.count("l", bucket_of(now), 10, now)
        account.settle("l", bucket_of(now - 2 * WINDOW_MS), -3, now)  # of one that took two minutes
        for window in (account.requests, account.tokens):
            assert len(window.buckets) <= WINDOW_MS // BUCKET_MS + 2
    assert account.requests.total(now) == WINDOW_MS // BUCKET_MS + 1


def test_a_replica_alone_keeps_to_its_part() -> None:
    account = Account()
    taken = 0
    while account.decide(LIMITS, 1, 3, NOW).refused_by is None:
        account.count(f"l{taken}", bucket_of(NOW), 1, NOW)
        taken += 1
    assert taken == 3
    assert Account().decide(Limits(requests_per_minute=1), 1, 5, NOW).refused_by is None, "one always may"


def test_a_request_beyond_a_part_of_the_limit_passes_alone_and_counts_in_full() -> None:
    for limits, measure in ((LIMITS, "tokens"), (Limits(tokens_per_day=1000), "quota")):
        account = Account()
        assert account.decide(limits, 1000, 3, NOW).refused_by is None, "as it would with one router"
        account.count("l", bucket_of(NOW), 1000, NOW)
        assert account.tokens.total(NOW) == account.day_tokens == 1000
        for tokens in (1, 1000):
            refused = account.decide(limits, tokens, 3, NOW)
            assert refused.refused_by == measure and refused.wait_ms > 0
            later = deepcopy(account)
            assert later.decide(limits, tokens, 3, NOW + refused.wait_ms).refused_by is None
        account.settle("l", bucket_of(NOW), -900, NOW)
        assert account.decide(limits, 233, 3, NOW).refused_by is None
        assert account.decide(limits, 234, 3, NOW).refused_by == measure
    assert Account().decide(LIMITS, 1001, 3, NOW).wait_ms == -1


def test_concurrent_requests_and_the_quota_of_a_day() -> None:
    account, limits = Account(), Limits(concurrent=1, tokens_per_day=100)
    account.count("l", bucket_of(NOW), 60, NOW)
    assert account.decide(limits, 10, 1, NOW).refused_by == "concurrent"
    account.settle("l", bucket_of(NOW), 0, NOW)
    assert account.decide(limits, 10, 1, NOW).refused_by is None
    refused = account.decide(limits, 50, 1, NOW)
    assert (refused.refused_by, refused.wait_ms) == ("quota", DAY_MS - NOW % DAY_MS)
    assert account.decide(limits, 50, 1, NOW + refused.wait_ms).refused_by is None


def test_headers_are_openais() -> None:
    account = Account()
    account.count("l", bucket_of(NOW), 300, NOW)
    headers = limit_headers(account.decide(LIMITS, 100, 1, NOW))
    assert headers == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "8",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    assert limit_headers(Account().decide(Limits(concurrent=1), 1, 1, NOW)) == {}


def test_a_breaker_opens_and_tries_again_ever_more_rarely() -> None:
    breaker = Breaker()
    assert [breaker.failed(0.0, by_timeout=True) for _ in range(TIMEOUTS)] == [False] * (TIMEOUTS - 1) + [
        True
    ]
    now, tries = 0.0, []
    while now < 20:
        if breaker.may_try(now):
            assert not breaker.failed(now, by_timeout=True), "it is open"
            tries.append(now)
        now += 0.01
    gaps = [after - before for before, after in pairwise(tries)]
    assert max(gaps) <= MAX_PAUSE_S + 0.02 and min(gaps[5:]) >= MAX_PAUSE_S / 2
    breaker.succeeded()
    assert not breaker.open and breaker.may_try(now)
    assert breaker.failed(now, by_timeout=False), "a refusal opens it at once"
