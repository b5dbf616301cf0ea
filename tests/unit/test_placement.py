"""Who is chosen for a request."""

from __future__ import annotations

from dataclasses import replace

from baton.router.placement import Choice, WorkerReport, least_loaded

P1 = WorkerReport("p1", "prefill", prefill_tokens=0, sequences=0)
P2 = replace(P1, address="p2")
D1 = WorkerReport("d1", "decode", prefill_tokens=0, sequences=0)
D2 = replace(D1, address="d2")
B1 = WorkerReport("b1", "both", prefill_tokens=0, sequences=0)


def test_prefill_is_chosen_by_waiting_tokens_and_decode_by_sequences() -> None:
    busy_prefill, busy_decode = replace(P1, prefill_tokens=100), replace(D2, sequences=1)
    many = replace(P2, sequences=9)
    assert least_loaded([busy_prefill, many, busy_decode, D1]) == Choice("d1", "p2")


def test_among_equals_it_is_whoever_waited_longest() -> None:
    workers = [replace(P1, last_given_s=2.0), replace(P2, last_given_s=1.0)]
    workers += [replace(D1, last_given_s=3.0), replace(D2, last_given_s=4.0)]
    assert least_loaded(workers) == Choice("d1", "p2")
    assert least_loaded(workers[::-1]) == Choice("d1", "p2")


def test_one_that_is_both_computes_the_prompt_as_well() -> None:
    assert least_loaded([P1, replace(D1, sequences=1), B1]) == Choice("b1")
    assert least_loaded([P1, D1, replace(B1, sequences=1)]) == Choice("d1", "p1")


def test_without_prefill_decode_computes_the_prompt() -> None:
    assert least_loaded([D1]) == Choice("d1")


def test_without_decode_there_is_nobody() -> None:
    assert least_loaded([P1, P2]) is None
