"""Bad words are found by an automaton: the same as by comparing every run, built once, beside the steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.sampling_params import ResolvedSampling, SamplingFields
from baton.engine.engine import Engine
from baton.engine.sampling import bad_words_builder as builder_module
from baton.engine.sampling.bad_words import BadWords
from baton.engine.sampling.bad_words_builder import AT_ONCE_TOKENS, BadWordsBuilder
from baton.engine.sampling.logits import LogitRules
from baton.engine.sequence import Fork, Sequence
from baton.request.errors import RequestError
from baton.request.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, ModelInfo, SamplingLimits
from baton.request.sampling import resolve
from baton.text.tokenizer import Tokenizer
from tests.support.fake_engine import VOCAB_SIZE, fake_engine, run_alone
from tests.support.tiny_models import save_byte_tokenizer

Run = tuple[int, ...]

PLAIN = ResolvedSampling(max_tokens=12, seed=7, temperature=2.0, ignore_eos=True)
FEW = st.integers(0, 2)
"""Few tokens, so that beginnings overlap."""
RUNS = st.lists(st.lists(FEW, min_size=1, max_size=9).map(tuple), max_size=14)
Q, C, MANY, LONG = 5, 40, 1000, 127
LIMIT_S = 60.0


def completed(runs: list[Run], outputs: list[int]) -> set[int]:
    """The tokens that would complete a run behind ``outputs``, as the words say it."""
    return {
        run[-1]
        for run in runs
        if len(run) <= len(outputs) + 1 and tuple(outputs[len(outputs) + 1 - len(run) :]) == run[:-1]
    }


@settings(deadline=None)
@given(runs=RUNS, outputs=st.lists(FEW | st.just(VOCAB_SIZE - 1), max_size=30))
def test_the_automaton_bars_what_completes_a_run(runs: list[Run], outputs: list[int]) -> None:
    words = BadWords(runs)
    state = 0
    for upto in range(len(outputs) + 1):
        said = outputs[:upto]
        assert set(words.barred(state).tolist()) == completed(runs, said)
        assert words.start(said) == state
        state = words.follow(state, outputs[upto : upto + 1])
    assert words.num_states <= 1 + sum(len(run) - 1 for run in runs)


def test_the_longest_runs_that_overlap_most_are_found_too() -> None:
    runs = [(Q,) * (length - 1) + (C + length % 17,) for length in range(2, 129)]
    runs += [(Q,) * begun + (C,) + (Q,) * (126 - begun) + (9,) for begun in range(126)]
    words, state = BadWords(runs), 0
    said: list[int] = []
    for token in (*[Q] * 140, C, *[Q] * 126, C, C, *[Q] * 30):
        said.append(token)
        state = words.follow(state, (token,))
        assert set(words.barred(state).tolist()) == completed(runs, said)


@settings(deadline=None)
@given(
    runs=RUNS,
    outputs=st.lists(FEW, max_size=12),
    drafts=st.lists(st.lists(FEW, max_size=5), min_size=12, max_size=12),
    begin=st.integers(0, 12),
)
def test_drafts_are_followed_and_forgotten(
    runs: list[Run], outputs: list[int], drafts: list[list[int]], begin: int
) -> None:
    prompt = [0, 1, 2, 0]
    rules = LogitRules(replace(PLAIN, bad_word_ids=tuple(runs)), prompt, frozenset())
    for upto in range(min(begin, len(outputs)), len(outputs) + 1):
        for ahead in range(len(drafts[upto % 12]) + 1):
            said = outputs[:upto] + drafts[upto % 12][:ahead]
            assert set(rules.barred(prompt + said, ahead).tolist()) == completed(runs, said)


class Watched(list[int]):
    """Tokens that count how many of them are read."""

    reads = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_the_new_token_alone_however_many_runs_there_are() -> None:
    runs = tuple((Q,) * (LONG - at % 27) + (C + at % 200,) for at in range(MANY))
    rules = LogitRules(replace(PLAIN, bad_word_ids=runs), [1, 2], frozenset())
    tokens = Watched([1, 2])
    rules.barred(tokens)
    for _ in range(300):
        tokens.append(Q)
        tokens.reads = 0
        barred = rules.barred(tokens)
        assert tokens.reads <= 1
    assert set(barred.tolist()) == {run[-1] for run in runs}


# --- one automaton for all answers


def answers(n: int, params: ResolvedSampling, name: str = "r") -> Sequence:
    forks = tuple(Fork(f"{name}-{at}", replace(params, seed=at)) for at in range(1, n))
    return Sequence(f"{name}-0", 1, [1, 2, 3], replace(params, seed=0), forks=forks)


def drawn(engine: Engine, *sequences: Sequence) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    for seq in sequences:
        engine.add(seq)
    while engine.has_work:
        if engine.stalled:
            assert engine.work.wait(LIMIT_S)
        engine.work.clear()
        for output in engine.step():
            told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
    return told


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BadWords]]:
    """The automata that are built from here on."""
    made: list[BadWords] = []

    class Noted(BadWords):
        def __init__(self, runs: object, rest: Callable[[], None] = lambda: None) -> None:
            super().__init__(runs, rest)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(builder_module, "BadWords", Noted)
    yield made


@pytest.mark.parametrize("more", [(), tuple((at % VOCAB_SIZE, at // 9 % 7, 3) * 9 for at in range(99))])
def test_answers_to_one_prompt_share_an_automaton(built: list[BadWords], more: tuple[Run, ...]) -> None:
    """The runs of ``more`` have too many tokens for an automaton that is built at once."""
    runs = tuple(dict.fromkeys((*((at, at + 1) for at in range(VOCAB_SIZE - 1)), *more)))
    params = replace(PLAIN, bad_word_ids=runs)
    told = drawn(fake_engine(), answers(6, params))
    assert len(built) == 1
    assert len(told) == 6
    for number in range(6):
        alone = Sequence("alone", 1, [1, 2, 3], replace(params, seed=number))
        assert told[f"r-{number}"] == drawn(fake_engine(), alone)["alone"]
        for at, token in enumerate(told[f"r-{number}"]):
            assert token not in completed(list(runs), told[f"r-{number}"][:at])


# --- the builder


def large(first: int = 1) -> tuple[Run, ...]:
    runs = tuple((first, at, *range(30)) for at in range(AT_ONCE_TOKENS // 30))
    assert sum(map(len, runs)) > AT_ONCE_TOKENS
    return runs


class Held(BadWords):
    """Automata that are begun one by one."""

    gate = threading.Semaphore(0)
    begun: list[Run]

    def __init__(self, runs: tuple[Run, ...], rest: Callable[[], None] = lambda: None) -> None:
        assert self.gate.acquire(timeout=LIMIT_S)
        self.begun.append(runs[0])
        super().__init__(runs, rest)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    Held.gate, Held.begun = threading.Semaphore(0), []
    monkeypatch.setattr(builder_module, "BadWords", Held)
    return Held


def test_a_small_one_is_done_at_once_and_a_large_one_on_a_thread(held: type[Held]) -> None:
    builder = BadWordsBuilder()
    later = builder.build(large())
    assert not later.done()
    held.gate.release(2)
    later.result(LIMIT_S)
    assert builder.build(((1, 2),)).done()


def test_the_same_runs_are_built_once_for_a_tenant(held: type[Held]) -> None:
    builder = BadWordsBuilder()
    one = builder.build(large(), "acme")
    assert builder.build(large(), "acme") is one
    other = builder.build(large(), "evil")
    assert other is not one
    held.gate.release(2)
    for future in (one, other):
        future.result(LIMIT_S)


def test_tenants_take_turns(held: type[Held]) -> None:
    builder = BadWordsBuilder()
    asked = [builder.build(large(number), "evil") for number in range(1, 6)]
    asked.append(builder.build(large(9), "acme"))
    held.gate.release(len(asked))
    for future in asked:
        future.result(LIMIT_S)
    assert [run[0] for run in held.begun].index(9) <= 2


def test_nothing_is_built_for_those_who_have_left(held: type[Held]) -> None:
    builder = BadWordsBuilder()
    first = builder.build(large(1))
    left: Future[BadWords] | None = builder.build(large(2))
    last = builder.build(large(3))
    left = None
    gc.collect()
    assert left is None
    held.gate.release(3)
    last.result(LIMIT_S)
    assert first.done()
    assert [run[0] for run in held.begun] == [1, 3]


def test_a_request_waits_for_its_automaton_and_holds_up_no_other(held: type[Held]) -> None:
    engine = fake_engine()
    slow = Sequence("slow", 1, [1, 2], replace(PLAIN, bad_word_ids=large()))
    engine.add(slow)
    free = Sequence("free", 1, [4, 5], PLAIN)
    engine.add(free)
    while not free.finish_reason:
        engine.step()
    assert free.output_ids == run_alone([4, 5], PLAIN)
    assert not slow.output_ids
    assert engine.has_work
    held.gate.release()
    while not slow.finish_reason:
        assert engine.work.wait(LIMIT_S)
        engine.work.clear()
        while engine.step():
            pass
    assert len(slow.output_ids) == PLAIN.max_tokens


def test_a_request_that_is_cancelled_meanwhile_never_runs(held: type[Held]) -> None:
    engine = fake_engine()
    seq = Sequence("slow", 1, [1, 2], replace(PLAIN, bad_word_ids=large()))
    engine.add(seq)
    assert engine.cancel("slow", 1)
    held.gate.release()
    drawn(engine, Sequence("free", 1, [4, 5], PLAIN))
    assert not seq.output_ids
    assert not engine.has_work


# --- the bounds


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (tuple((at % VOCAB_SIZE, at // VOCAB_SIZE, 1) for at in range(MAX_BAD_WORDS + 1)), "2049 runs"),
        (((1,) * (MAX_BAD_WORD_TOKENS + 1),), f"{MAX_BAD_WORD_TOKENS + 1} tokens; allowed: "),
    ],
)
def test_a_worker_refuses_more_than_its_bounds(runs: tuple[Run, ...], message: str) -> None:
    engine = fake_engine()
    for accept in (engine.check, engine.add):
        with pytest.raises(ValueError, match=message):
            accept(Sequence("r", 1, [5], replace(PLAIN, bad_word_ids=runs)))


@pytest.mark.parametrize(
    ("words", "ids", "param", "total"),
    [(["aaa", "bbbb"], [], "bad_words", 16), ([], [(1, 2, 3)] * 2 + [(4,) * 8], "bad_word_ids", 11)],
)
def test_a_router_refuses_more_tokens_by_the_field_that_has_them(
    words: list[str], ids: list[Run], param: str, total: int, tmp_path: Path
) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    model = ModelInfo("m", "", max_model_len=100, vocab_size=257)

    def resolved(most: int) -> ResolvedSampling:
        fields, limits = SamplingFields(bad_words=words), SamplingLimits(max_bad_word_tokens=most)
        return resolve(
            fields, model, limits, tokenizer, prompt_tokens=1, default_max_tokens=5, bad_word_ids=ids
        )

    assert sum(map(len, resolved(total).bad_word_ids)) == total
    with pytest.raises(
        RequestError, match=f"{param} has {total} tokens, .* at most {total - 1} are"
    ) as refused:
        resolved(total - 1)
    assert refused.value.param == param


def test_an_automaton_of_as_many_tokens_as_are_allowed_has_a_place_for_each() -> None:
    runs = [tuple((at * 7 + place * at) % 4096 for place in range(128)) for at in range(1024)]
    assert sum(map(len, runs)) == MAX_BAD_WORD_TOKENS
    words = BadWords(runs)
    for run_ in (runs[1], runs[1023]):
        assert run_[-1] in words.barred(words.follow(0, run_[:-1])).tolist()
