"""Whose grammar is tried out next: fair by tenant, bounded in all, and paid for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.structured_output import StructuredOutput
from baton.grammar.cache import GrammarKey
from baton.grammar.errors import GrammarBusyError, GrammarLimitError
from baton.grammar.turns import MINUTE_S, PendingGrammar, TrialBudgets, TrialTurns


def pending(name: str = "a") -> PendingGrammar:
    return PendingGrammar(GrammarKey("", StructuredOutput("regex", name)), Future())


def turns_of(seconds: float | None = None, most: int = 100, max_of_tenant: int = 10) -> TrialTurns:
    return TrialTurns(TrialBudgets(seconds), most, max_of_tenant)


def test_a_tenant_waits_for_its_own_grammars_alone() -> None:
    turns = turns_of()
    for number in range(5):
        turns.offer("acme", pending(f"{number}"), 0.0)
    assert turns.next() is not None
    assert not turns.ready, "a tenant has one trial at a time"
    turns.offer("other", pending("other"), 0.0)
    turn = turns.next()
    assert turn is not None and turn[0] == "other"
    turns.end("other", 0.01, 0.0)
    turns.end("acme", 0.6, 0.0)
    turns.offer("other", pending("more"), 0.0)
    turn = turns.next()
    assert turn is not None and turn[0] == "other", "it has used less"


@given(st.lists(st.sampled_from([0.01, 0.1, 0.5]), min_size=3, max_size=3))
def test_seconds_are_shared_evenly_whatever_a_trial_takes(takes: list[float]) -> None:
    turns = turns_of(most=1000, max_of_tenant=1000)
    used = [0.0] * len(takes)
    for number in range(200):
        for tenant in range(len(takes)):
            turns.offer(f"t{tenant}", pending(f"{number}"), 0.0)
    while min(used) < 1.0:
        turn = turns.next()
        assert turn is not None
        tenant = int(turn[0][1:])
        used[tenant] += takes[tenant]
        turns.end(turn[0], takes[tenant], 0.0)
    assert max(used) - min(used) <= 2 * max(takes)


def test_one_tenant_does_not_fill_the_queue_for_others() -> None:
    turns = turns_of(most=20, max_of_tenant=5)
    for number in range(5):
        turns.offer("acme", pending(f"{number}"), 0.0)
    with pytest.raises(GrammarLimitError, match="5 new grammars of this tenant wait already"):
        turns.offer("acme", pending("more"), 0.0)
    for tenant in range(15):
        turns.offer(f"t{tenant}", pending(f"{tenant}"), 0.0)
    with pytest.raises(GrammarBusyError, match="too many grammars wait") as refused:
        turns.offer("late", pending("late"), 0.0)
    assert not isinstance(refused.value, GrammarLimitError), "that is nobody's fault in particular"


def test_who_has_used_up_its_budget_is_refused_until_it_is_made_up_for() -> None:
    turns = turns_of(seconds=6.0)
    waiting = [pending(f"{number}") for number in range(3)]
    for each in waiting:
        turns.offer("acme", each, 0.0)
    assert turns.next() is not None
    assert turns.end("acme", 5.9, 0.0) == []
    assert turns.next() is not None
    assert turns.end("acme", 3.1, 0.0) == waiting[2:], "9 s of 6"
    assert not turns.waiting
    with pytest.raises(GrammarLimitError, match="have taken the 6 s a minute") as refused:
        turns.offer("acme", pending("more"), 0.0)
    wait_s = refused.value.retry_after_s
    assert 30.0 < wait_s < 31.0, "3 s, at 6 s a minute"
    turns.offer("other", pending("other"), 0.0)
    with pytest.raises(GrammarLimitError):
        turns.offer("acme", pending("more"), 29.9)
    turns.offer("acme", pending("more"), wait_s)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 1.5)), max_size=300))
def test_no_tenant_takes_more_than_its_seconds_in_any_minutes(steps: list[tuple[float, float]]) -> None:
    budgets, now = TrialBudgets(5.0), 0.0
    taken: list[tuple[float, float]] = []
    for pause, seconds in steps:
        now += pause
        if budgets.wait_s("acme", now) == 0:
            budgets.spend("acme", seconds, now)
            taken.append((now, seconds))
    for first in range(0, len(taken), 7):
        begin = taken[first][0]
        for minutes in (1, 2, 5):
            used = sum(s for at, s in taken if begin <= at < begin + minutes * MINUTE_S)
            # What the bucket held, what has come into it, and the one trial that nobody could foresee.
            assert used <= 5.0 + minutes * 5.0 + 1.5 + 1e-6


def test_what_two_tenants_want_is_tried_out_for_each() -> None:
    turns = turns_of(seconds=1.0)
    turns.offer("acme", pending("slow"), 0.0)
    assert turns.next() is not None
    ours, others = pending("same"), pending("same")
    turns.offer("acme", ours, 0.0)
    turns.offer("other", others, 0.0)
    assert turns.waiting == 2
    assert turns.end("acme", 2.0, 0.0) == [ours], "whoever else waits for the same"
    assert turns.next() == ("other", others)
    assert not turns.waiting


def test_nothing_is_kept_of_tenants_that_have_nothing_here() -> None:
    turns = turns_of(seconds=5.0)
    for number in range(50):
        turns.offer(f"t{number}", pending(), float(number))
        assert turns.next() is not None
        turns.end(f"t{number}", 0.01, float(number))
    assert not turns._queues
    assert len(turns._budgets._spent) <= 2
