"""What parameters do to logits, against plain references in float64: no batches, no counts kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.logits import LogitRules, Row, adjust
from tests.support.deep import all_deep_but

VOCAB = 11
EOS = frozenset({0, 7})
PLAIN = ResolvedSampling(max_tokens=100)

Logits = list[float]
Case = tuple[ResolvedSampling, list[int], list[int], Logits]
"""Parameters, prompt, outputs so far, and the model's logits after them."""


def only_allowed(logits: Logits, p: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Logits:
    if not p.allowed_token_ids:
        return logits
    return [x if token in p.allowed_token_ids else -math.inf for token, x in enumerate(logits)]


def no_bad_words(logits: Logits, p: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Logits:
    def completes(token: int) -> bool:
        said = (*outputs, token)
        return any(len(said) >= len(run) and said[-len(run) :] == run for run in p.bad_word_ids)

    return [-math.inf if completes(token) else x for token, x in enumerate(logits)]


def no_early_end(logits: Logits, p: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Logits:
    if len(outputs) >= p.min_tokens:
        return logits
    return [-math.inf if token in EOS | p.stop_token_ids else x for token, x in enumerate(logits)]


def biased(logits: Logits, p: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Logits:
    return [x + dict(p.logit_bias).get(token, 0.0) for token, x in enumerate(logits)]


def penalized(logits: Logits, p: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Logits:
    result = []
    for token, x in enumerate(logits):
        if token in prompt or token in outputs:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = outputs.count(token)
        result.append(x - p.frequency_penalty * count - (p.presence_penalty if count else 0.0))
    return result


IN_ORDER: list[Callable[[Logits, ResolvedSampling, list[int], list[int]], Logits]] = [
    only_allowed,
    no_bad_words,
    no_early_end,
    biased,
    penalized,
]

TOKEN = st.integers(0, VOCAB - 1)
FREQUENT = st.integers(0, 3)
"""Few distinct tokens, so that runs and repetitions come often."""
PENALTY = st.sampled_from([-2.0, -0.3, 0.5, 1.7])
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "allowed_token_ids": st.lists(TOKEN, min_size=1, max_size=6, unique=True).map(tuple),
    "bad_word_ids": st.lists(st.lists(FREQUENT, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    "min_tokens": st.integers(1, 6),
    "stop_token_ids": st.frozensets(TOKEN, max_size=3),
    "logit_bias": st.dictionaries(TOKEN, st.floats(-100, 100, width=32), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    "repetition_penalty": st.sampled_from([0.25, 0.9, 1.3, 3.0]),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
}
ALONE = [
    ("allowed_token_ids",),
    ("bad_word_ids",),
    ("min_tokens", "stop_token_ids"),
    ("logit_bias",),
    ("repetition_penalty",),
    ("presence_penalty",),
    ("frequency_penalty",),
    tuple(FIELDS),
]


def cases(fields: Sequence[str]) -> st.SearchStrategy[Case]:
    params = st.fixed_dictionaries({}, optional={name: FIELDS[name] for name in fields}).map(
        lambda chosen: replace(PLAIN, **chosen)  # type: ignore[arg-type]
    )
    prompt = st.lists(st.one_of(FREQUENT, TOKEN), min_size=1, max_size=6)
    outputs = st.lists(FREQUENT, max_size=8)
    logits = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)
    return st.tuples(params, prompt, outputs, logits)


def row(at: int, params: ResolvedSampling, prompt: list[int], outputs: list[int]) -> Row | None:
    rules = LogitRules.of(params, prompt, EOS)
    return None if rules is None else Row(at, rules, prompt + outputs)


def reference(case: Case) -> Logits:
    params, prompt, outputs, logits = case
    for change in IN_ORDER:
        logits = change(logits, params, prompt, outputs)
    return logits


@pytest.mark.parametrize("fields", all_deep_but(3, [pytest.param(fields) for fields in ALONE]), ids="+".join)
@settings(deadline=None)
@given(data=st.data())
def test_each_rule_and_all_together_for_any_batch(fields: Sequence[str], data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(fields), min_size=1, max_size=4))
    logits = torch.tensor([case[3] for case in batch])
    rows = [row(at, params, prompt, outputs) for at, (params, prompt, outputs, _) in enumerate(batch)]
    adjust(logits, [r for r in rows if r is not None])
    expected = torch.tensor([reference(case) for case in batch], dtype=torch.float64)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(case=cases(tuple(FIELDS)), later=st.lists(FREQUENT, max_size=6))
def test_counts_kept_from_step_to_step_are_those_of_the_tokens(case: Case, later: list[int]) -> None:
    params, prompt, outputs, logits = case
    if (kept := LogitRules.of(params, prompt, EOS)) is None:
        return
    for upto in range(len(later) + 1):
        said = outputs + later[:upto]
        step, anew = torch.tensor([logits]), torch.tensor([logits])
        adjust(step, [Row(0, kept, prompt + said)])
        adjust(anew, [Row(0, LogitRules(params, prompt, EOS), prompt + said)])
        assert torch.equal(step, anew)


def test_bad_words_begin_in_the_output() -> None:
    params = replace(PLAIN, bad_word_ids=((1, 2, 3), (4,)))
    for prompt, outputs, barred in (([1, 2], [], [4]), ([1], [2], [4]), ([9], [1, 2], [3, 4])):
        logits = torch.zeros(1, VOCAB)
        bad = row(0, params, prompt, outputs)
        assert bad is not None
        adjust(logits, [bad])
        assert logits[0].isinf().nonzero().flatten().tolist() == barred


def test_rows_without_rules_are_left_alone() -> None:
    assert LogitRules.of(PLAIN, [1, 2], EOS) is None
    assert LogitRules.of(replace(PLAIN, temperature=0.3, top_k=2, stop_token_ids=EOS), [1], EOS) is None
    logits = torch.ones(2, VOCAB)
    only = row(1, replace(PLAIN, allowed_token_ids=(3,)), [1], [])
    assert only is not None
    adjust(logits, [only])
    assert torch.equal(logits[0], torch.ones(VOCAB))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (PLAIN, True),
        (replace(PLAIN, bad_word_ids=tuple((t,) for t in range(VOCAB - 1))), True),
        (replace(PLAIN, bad_word_ids=tuple((t,) for t in range(VOCAB))), False),
        (replace(PLAIN, bad_word_ids=tuple((1, t) for t in range(VOCAB))), False),
        (replace(PLAIN, allowed_token_ids=(0, 7)), True),
        (replace(PLAIN, allowed_token_ids=(0, 7), min_tokens=1), False),
        (replace(PLAIN, allowed_token_ids=(0, 3), min_tokens=1, stop_token_ids=frozenset({3})), False),
        (replace(PLAIN, allowed_token_ids=(0, 3), min_tokens=1), True),
        (replace(PLAIN, allowed_token_ids=(3,), bad_word_ids=((2, 3),)), False),
    ],
)
def test_parameters_know_whether_a_step_could_have_nothing_to_choose(
    params: ResolvedSampling, left: bool
) -> None:
    assert params.leaves_a_token(VOCAB, EOS) is left
