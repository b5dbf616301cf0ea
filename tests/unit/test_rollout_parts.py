"""What ``loadtest.rollout`` rolls out and judges with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.simulated.main import FIRST_WORD
from tests.support.rollout.deployment import Member, Strategy
from tests.support.rollout.judge import ForeignTokenError, handoffs, writers
from tests.support.simulated import Told, simulated_answer

VOCABULARY = 4096
PROMPT = [3, 1, 4, 1, 5]


def deployment(replicas: int, surge: int | str, unavailable: int | str) -> dict[str, object]:
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    return {"spec": {"replicas": replicas, "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling}}}


@pytest.mark.parametrize(
    ("replicas", "surge", "unavailable", "expected"),
    [
        (2, 1, 0, (1, 0)),
        (4, "25%", "25%", (1, 1)),
        (3, "25%", "25%", (1, 0)),
        (3, "10%", "10%", (1, 0)),
        (1, 0, "25%", (0, 1)),
    ],
)
def test_shares_become_pods(
    replicas: int, surge: int | str, unavailable: int | str, expected: tuple[int, int]
) -> None:
    found = Strategy.of(deployment(replicas, surge, unavailable))
    assert (found.max_surge, found.max_unavailable) == expected


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.integers(0, 2), max_size=20),
)
def test_a_rolling_update_ends_and_keeps_to_its_bounds(
    replicas: int, surge: int, unavailable: int, choices: Sequence[int]
) -> None:
    strategy = Strategy(replicas, surge, unavailable if surge or unavailable else 1)
    pods = {f"old-{number}": Member(f"old-{number}", new=False, ready=True) for number in range(replicas)}
    made = 0
    for choice in (*choices, *[1] * 20):  # so many are ready by the next look
        step = strategy.next(list(pods.values()))
        for name in step.delete:
            del pods[name]
        for _ in range(step.create):
            made += 1
            pods[f"new-{made}"] = Member(f"new-{made}", new=True, ready=False)
        assert len(pods) <= replicas + strategy.max_surge
        assert sum(pod.ready for pod in pods.values()) >= replicas - strategy.max_unavailable
        starting = [name for name, pod in pods.items() if not pod.ready]
        for name in starting[:choice]:
            pods[name] = Member(name, new=True, ready=True)
    assert all(pod.new and pod.ready for pod in pods.values())
    assert len(pods) == replicas == made


def test_a_pod_that_is_never_ready_stalls_it() -> None:
    strategy = Strategy(2, 1, 0)
    pods = [Member("a", False, True), Member("b", False, True), Member("c", True, False)]
    assert strategy.next(pods) == (0, ())


def test_a_rollback_deletes_what_is_not_ready_first() -> None:
    pods = [Member("a", True, True), Member("b", True, True), Member("c", False, False)]
    assert Strategy(2, 1, 0).next(pods) == (0, ("c",))


def test_who_wrote_an_answer_is_told_by_its_tokens() -> None:
    begun = simulated_answer(PROMPT, 5, VOCABULARY, revision="a")
    ended = simulated_answer([*PROMPT, *begun], 5, VOCABULARY, revision="b")
    assert writers(PROMPT, begun + ended, 0, ["a", "b"], VOCABULARY) == ["a"] * 5 + ["b"] * 5


def test_words_that_two_would_say_are_no_change() -> None:
    """Of a vocabulary of four words many are the same."""
    answer = simulated_answer(PROMPT, 40, FIRST_WORD + 4, revision="b")
    assert writers(PROMPT, answer, 0, ["a", "b", "c"], FIRST_WORD + 4) == ["b"] * 40


@pytest.mark.parametrize("wrong", ["cut", "repeated", "another seed"])
def test_an_answer_that_is_not_whole_is_found(wrong: str) -> None:
    answer = simulated_answer(PROMPT, 9, VOCABULARY, revision="a", seed=7 if wrong == "another seed" else 0)
    told = {"cut": answer[:4] + answer[5:], "repeated": answer[:4] + answer[3:]}.get(wrong, answer)
    with pytest.raises(ForeignTokenError, match="is of no revision"):
        writers(PROMPT, told, 0, ["a", "b"], VOCABULARY)


def test_kv_of_one_revision_in_the_hands_of_another_gives_tokens_of_none() -> None:
    a, b = (Told(PROMPT, VOCABULARY, revision=revision) for revision in "ab")
    a._draw = b._draw  # what b says of a's words
    with pytest.raises(ForeignTokenError, match="token 0"):
        writers(PROMPT, [a.next], 0, ["a", "b"], VOCABULARY)


def line(role: str, request: str) -> str:
    return (
        f"2026-01-01 00:00:00,000 DEBUG baton.roles.{role}: handoff "
        f'{{"request_id": "{request}", "attempt": 0, "at": {{}}}}\n'
    )


def test_both_ends_of_a_handoff_are_put_together() -> None:
    logs = [
        ("a", line("prefill", "1") + line("prefill", "2") + line("prefill", "3")),
        ("a", line("decode", "1") + "x WARNING y: decode refused the link: revision differs: prefill b\n"),
        ("b", line("decode", "2")),
    ]
    found = handoffs(logs)
    assert found.pairs == {("a", "a"): 1, ("a", "b"): 1}
    assert (found.total, found.cross, found.one_ended, found.refused) == (2, 1, 1, 1)
