"""Tokens in a minute hold whatever a request asks: n, max_tokens or none, and with Redis away."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.sampling_params import ResolvedSampling
from baton.router.api.admission import MIN_ANSWER, computed_answers, fitted, reservation, used_tokens
from baton.router.api.errors import ApiError
from baton.router.api.job import Job
from baton.router.shared.limits import (
    BUCKET_MS,
    WINDOW_BUCKETS,
    WINDOW_MS,
    LimitDecision,
    Limits,
    RemainingLimit,
    Tenant,
    bucket_of,
)
from baton.router.shared.windows import Account
from tests.support.fake_ring import MODEL

NOW = 1_800_000_000_123
CONTEXT = 4096


def job_of(
    prompt: int,
    n: int = 1,
    max_tokens: int | None = None,
    *,
    prompts: int = 1,
    min_tokens: int = 0,
    width: int | None = None,
) -> Job:
    beams = None if width is None else BeamParams(width, 1.0, EarlyStopping.HEURISTIC)
    longest = CONTEXT - prompt if max_tokens is None else max_tokens
    return Job(
        request_id="r",
        endpoint="e",
        started=0.0,
        model=MODEL,
        prompts=[[1] * prompt] * prompts,
        params=ResolvedSampling(max_tokens=longest, seed=0, min_tokens=min_tokens, beam_search=beams),
        n=n,
        open_ended=max_tokens is None,
    )


def tenant_of(limit: int | None, day: int | None = None) -> Tenant:
    return Tenant("acme", Limits(tokens_per_minute=limit, tokens_per_day=day))


def fit(job: Job, limit: int | None = 1000, day: int | None = None) -> Job:
    return fitted(
        job, tenant_of(limit, day), prompt_param="messages", max_tokens_param="max_completion_tokens"
    )


@pytest.mark.parametrize(
    ("job", "param", "part"),
    [
        (job_of(1001, 1, 1), "messages", "1001 tokens of prompt and 1 answers of up to 1 tokens make 1002"),
        (
            job_of(100, 1, 901),
            "max_completion_tokens",
            "make 1001, and the limit of acme is 1000 tokens per min",
        ),
        (job_of(100, 2, 451), "n", "100 tokens of prompt and 2 answers of up to 451 tokens make 1002"),
        (job_of(10, 1, 500, prompts=2), "messages", "20 tokens of prompt and 2 answers"),
        (job_of(10, 2, 200, width=8), "best_of", "8 answers of up to 200"),
        (job_of(10, 8, 200, width=8), "n", "8 answers of up to 200"),
        (job_of(990), "messages", "990 tokens of prompt and 1 answers of up to 16"),
        (job_of(10, 128), "n", "128 answers of up to 16 tokens make 2058"),
        (job_of(10, 2, min_tokens=600), "n", "2 answers of up to 600"),
        (job_of(10, 1, min_tokens=1500), "max_completion_tokens", "1 answers of up to 1500"),
    ],
)
def test_what_never_fits_is_refused_by_the_field_at_fault(job: Job, param: str, part: str) -> None:
    with pytest.raises(ApiError) as refused:
        fit(job)
    error = refused.value
    assert (error.status, error.code, error.param) == (429, "request_too_large", param)
    assert error.message.startswith(f"{param}: ") and part in error.message
    assert "retry-after" not in error.headers, "it never will"


def test_a_day_may_be_less_than_a_minute() -> None:
    with pytest.raises(ApiError, match="the limit of acme is 500 tokens per day"):
        fit(job_of(100, 1, 401), 1000, 500)
    assert reservation(fit(job_of(100), 1000, 500)) <= 500


def test_what_fits_is_left_as_it_is() -> None:
    for job in (job_of(100, 1, 900), job_of(100, 3, 300), job_of(10, 1, 61, prompts=14)):
        assert fit(job) == job
    big = job_of(2000, 128)
    assert fit(big, None) == big, "without a limit nothing is bounded"
    assert fit(job_of(10), 100_000).params.max_tokens == CONTEXT - 10, "nor where there is room for all"


@pytest.mark.parametrize("n", [1, 2, 8, 30])
def test_answers_of_open_length_share_half_of_what_the_prompt_leaves(n: int) -> None:
    job = fit(job_of(10, n))
    assert job.params.max_tokens == max(MIN_ANSWER, 495 // n)
    assert fit(job) == job, "it is settled"


def test_min_tokens_hold() -> None:
    assert fit(job_of(10, 1, min_tokens=900)).params.max_tokens == 900


def test_all_beams_count() -> None:
    job = job_of(10, 2, 50, width=8)
    assert computed_answers(job) == 8 and reservation(job) == 410
    assert used_tokens(job, 60) == 10 + 240, "two of eight were told"


Asked = tuple[int, int, int, int | None, int]
"""Pause in ms, n, tokens of the prompt, max_tokens, percent of it that is used."""
STEPS = st.lists(
    st.tuples(
        st.integers(0, 20_000),
        st.sampled_from([1, 2, 8, 64, 128]),
        st.integers(1, 600),
        st.one_of(st.none(), st.integers(1, 1200)),
        st.integers(0, 100),
    ),
    max_size=120,
)


def used_by(account: Account, tenant: Tenant, steps: list[Asked], replicas: int = 1) -> list[tuple[int, int]]:
    """When requests were admitted, and how many tokens each has used."""
    now, used = NOW, []
    for number, (pause, n, prompt, max_tokens, percent) in enumerate(steps):
        now += pause
        try:
            job = fitted(job_of(prompt, n, max_tokens), tenant, prompt_param="prompt")
        except ApiError:
            continue
        tokens = reservation(job)
        if account.decide(tenant.limits, tokens, replicas, now).refused_by is not None:
            continue
        lease, bucket = str(number), bucket_of(now)
        account.count(lease, bucket, tokens, now)
        account.borrow(lease, bucket, tokens, tenant.limits, replicas)
        taken = prompt + (tokens - prompt) * percent // 100
        account.settle(lease, bucket, taken - tokens, now)
        used.append((now, taken))
    return used


def in_window(used: list[tuple[int, int]], begin: int, minutes: int = 1) -> int:
    return sum(tokens for at, tokens in used if begin <= at < begin + minutes * WINDOW_MS)


@given(STEPS, st.integers(300, 3000))
def test_no_minute_has_more_than_its_limit_whatever_is_asked(steps: list[Asked], limit: int) -> None:
    used = used_by(Account(), tenant_of(limit), steps)
    for begin, _ in used:
        assert in_window(used, begin) <= limit


@given(st.lists(STEPS, min_size=3, max_size=3), st.integers(300, 3000))
def test_routers_that_are_on_their_own_keep_it_on_the_average(steps: list[list[Asked]], limit: int) -> None:
    """Over k minutes at most k limits, and what one request of each may owe the minutes after."""
    used = [
        each for part in steps for each in used_by(Account(), tenant_of(limit), part, replicas=len(steps))
    ]
    for begin, _ in used:
        for minutes in (1, 2, 5):
            assert in_window(used, begin, minutes) <= (minutes + len(steps) - 1) * limit


def test_a_request_beyond_the_share_pays_for_it_in_the_minutes_after() -> None:
    account, tenant = Account(), tenant_of(900)
    account.count("l", bucket_of(NOW), 900, NOW)
    account.borrow("l", bucket_of(NOW), 900, tenant.limits, 3)
    window_ms = (WINDOW_BUCKETS + 1) * BUCKET_MS
    for minutes, tokens, fits in ((1, 1, False), (2, 1, False), (2.9, 1, False), (3, 300, True)):
        now = NOW + int(minutes * window_ms)
        decision = account.decide(tenant.limits, tokens, 3, now)
        assert (decision.refused_by is None) is fits, minutes
        if not fits:
            assert decision.tokens is not None and decision.tokens.remaining == 0
            assert now + decision.wait_ms <= NOW + 3 * window_ms
            later = deepcopy(account)  # it forgets
            assert later.decide(tenant.limits, tokens, 3, now + decision.wait_ms).refused_by is None
    assert not account.debt.due(NOW + 3 * window_ms)


def test_what_was_not_used_is_not_owed() -> None:
    account, tenant = Account(), tenant_of(900)
    account.count("l", bucket_of(NOW), 900, NOW)
    account.borrow("l", bucket_of(NOW), 900, tenant.limits, 3)
    account.settle("l", bucket_of(NOW), -500, NOW)
    window_ms = (WINDOW_BUCKETS + 1) * BUCKET_MS
    assert sum(account.debt.due(NOW).values()) == 100
    assert account.decide(tenant.limits, 201, 3, NOW + window_ms).refused_by == "tokens"
    assert account.decide(tenant.limits, 200, 3, NOW + window_ms).refused_by is None
    account.settle("l", bucket_of(NOW), -900, NOW)
    assert not account.debt.due(NOW)


def test_one_router_owes_nothing() -> None:
    account, tenant = Account(), tenant_of(900)
    account.borrow("l", bucket_of(NOW), 900, tenant.limits, 1)
    account.borrow("l", bucket_of(NOW), 900, replace(tenant.limits, tokens_per_minute=None), 3)
    assert not account.debt.due(NOW)


class TestWhatOthersHadUsedWhenRedisToldLast:
    """A router on its own knows of that for as long as it may be in the window."""

    LIMITS = Limits(requests_per_minute=10, tokens_per_minute=1000)

    def account(self, requests: int, tokens: int) -> Account:
        """Of a router that had one request, of 100 tokens, when Redis told of so many in all."""
        account = Account()
        account.count("l", bucket_of(NOW), 100, NOW)
        told = LimitDecision(
            None,
            0,
            RemainingLimit(10, 10 - requests, 0),
            RemainingLimit(1000, 1000 - tokens, 0),
            bucket_of(NOW),
        )
        account.note_elsewhere(told, NOW)
        return account

    @pytest.mark.parametrize(
        ("requests", "tokens", "asked", "refused_by"),
        [
            (2, 200, 400, None),
            (2, 200, 401, "tokens"),  # its share is 500, of which it has used 100
            (2, 700, 300, None),
            (2, 700, 301, "tokens"),
            (2, 1000, 1, "tokens"),
            (9, 100, 1, None),
            (10, 100, 1, "requests"),
        ],
    )
    def test_no_more_is_admitted_than_was_left(
        self, requests: int, tokens: int, asked: int, refused_by: str | None
    ) -> None:
        account = self.account(requests, tokens)
        decision = account.decide(self.LIMITS, asked, 2, NOW)
        assert decision.refused_by == refused_by
        if refused_by is not None:
            assert 0 < decision.wait_ms <= WINDOW_MS + BUCKET_MS
            assert account.decide(self.LIMITS, asked, 2, NOW + decision.wait_ms).refused_by is None

    def test_what_is_too_large_is_so_for_ever(self) -> None:
        assert self.account(2, 900).decide(self.LIMITS, 1001, 2, NOW).wait_ms == -1

    def test_where_there_are_no_others_nothing_is_known_of_them(self) -> None:
        assert self.account(1, 100).elsewhere is None
        account = Account()
        account.note_elsewhere(LimitDecision(None), NOW)
        assert account.elsewhere is None
