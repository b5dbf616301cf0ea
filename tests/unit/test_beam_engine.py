"""Beam searches in the engine: shared blocks, pools too small, seats too few, cancels, and other requests."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.sampling.beams import Candidates
from baton.engine.scheduler import BeamsDoNotFitError
from baton.engine.sequence import FinishReason, Fork, Sequence
from baton_kernels.paged import PagedBatch
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine, run_alone
from tests.support.oracle_beams import Answer, beam_request, search
from tests.support.runners import arrived
from tests.unit.test_engine import HookedModel

pytestmark = pytest.mark.usefixtures("launched")

STOPS = frozenset(range(0, VOCAB_SIZE, 9))
GREEDY = ResolvedSampling(max_tokens=14, temperature=0.0)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((i * i * 29 + i * 13 + salt * 7 + 5) % VOCAB_SIZE for i in range(length))


def beams(
    width: int = 3, max_tokens: int = 14, stops: frozenset[int] = STOPS, **search: object
) -> ResolvedSampling:
    params = BeamParams(width, **search)  # type: ignore[arg-type]
    return ResolvedSampling(max_tokens=max_tokens, stop_token_ids=stops, beam_search=params)


@lru_cache(maxsize=4096)
def alone(prompt_ids: tuple[int, ...], params: ResolvedSampling, n: int) -> list[Answer]:
    """What a search finds with an engine to itself: no chunks, no cache, no want of blocks."""
    engine = fake_engine(
        2048, max_num_seqs=16, max_num_batched_tokens=1024, prefill_chunk=1024, prefix_caching=False
    )
    [found] = search(engine, beam_request("alone", prompt_ids, params, n))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_chunk": 3},
        {"chunked_prefill": False},
        {"prefix_caching": False},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_blocks": 32, "block_size": 5},
        {"host_blocks": 16, "num_blocks": 32},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_computed(settings: dict[str, int]) -> None:
    engine = fake_engine(**settings)  # type: ignore[arg-type]
    requests = [(prompt(length, length), beams(width)) for width, length in enumerate((1, 8, 21, 30), 1)]
    found = search(engine, *(beam_request(str(i), *each, n=2 if i else 1) for i, each in enumerate(requests)))
    assert found == [alone(*each, n=2 if i else 1) for i, each in enumerate(requests)]
    assert engine.stats().blocks.held == 0


def test_beams_share_what_they_have_in_common() -> None:
    class Counting(FakeModel):
        tokens = 0

        def forward(self, token_ids, batch, pool):  # type: ignore[no-untyped-def]
            self.tokens += len(token_ids)
            return super().forward(token_ids, batch, pool)

    model = Counting(VOCAB_SIZE)
    engine = fake_engine(model=model)
    most = 0
    engine.add(beam_request("r", prompt(30), beams(4, stops=frozenset()), n=4))
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().blocks.held)
    assert model.tokens == 30 + 4 * 13
    assert most <= 7 + 4 * 5, "each has the prompt's full blocks for itself"
    assert engine.stats().scheduler.copied_blocks > 0
    assert engine.stats().generated_tokens == 4 * 14


def test_a_prompt_in_the_prefix_cache_gives_the_same() -> None:
    engine = fake_engine()
    request = prompt(21), beams(4)
    first = search(engine, beam_request("a", *request, n=3))
    again = beam_request("b", *request, n=3)
    assert search(engine, again) == first == [alone(*request, n=3)]
    assert again.num_cached == 20


@pytest.mark.parametrize("chunk", [16, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_in_a_pool_too_small_for_two_they_are_preempted_and_nothing_else_changes(
    caching: bool, chunk: int
) -> None:
    params = beams(3, max_tokens=24, stops=frozenset(), length_penalty=0.5)
    engine = fake_engine(26, prefix_caching=caching, prefill_chunk=chunk)
    found = search(engine, *(beam_request(name, prompt(9, i), params, 3) for i, name in enumerate("abc")))
    assert found == [alone(prompt(9, i), params, 3) for i in range(3)]
    load = engine.stats()
    assert load.scheduler.preemptions > 0
    assert load.scheduler.copied_blocks > 0
    assert load.blocks.held == 0


class TwoRoads(FakeModel):
    """After the prompt 1 and 2 are as likely, and each is followed by itself: two beams part for good."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        return (token_ids if batch.wanted is None else token_ids[batch.wanted.rows])[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        tokens = torch.arange(self.vocab_size)
        parted = (hidden == 1) | (hidden == 2)
        return torch.where(parted, tokens == hidden, (tokens == 1) | (tokens == 2)) * 20.0


@pytest.mark.parametrize("chunk", [16, 1])
def test_a_beam_comes_back_into_a_pool_that_has_room_only_if_the_prompt_is_shared(chunk: int) -> None:
    params = beams(2, max_tokens=12, stops=frozenset())
    engine = fake_engine(17, prefix_caching=False, prefill_chunk=chunk, model=TwoRoads(VOCAB_SIZE))
    engine.add(beam_request("a", prompt(30), params, 2))
    while engine.stats().blocks.held < 7 + 2 * 3:
        engine.step()
    taken = engine.pool.allocate(engine.pool.num_allocatable)
    assert taken is not None
    while not engine.stats().scheduler.preemptions:
        engine.step()
    for _ in range(4):  # the other one computes what it can, and waits
        engine.step()
    assert engine.step() == []
    assert [len(seq.block_ids) for seq in engine.scheduler.running] == [7 + 4]
    engine.pool.free(taken)
    tokens: dict[str, list[int]] = {}
    for _ in range(60):
        for output in engine.step():
            if output.new_tokens:
                tokens.setdefault(output.seq.request_id, []).extend(output.new_tokens)
    assert sorted(tokens.values()) == [[1] * 12, [2] * 12]
    assert engine.stats().blocks.held == 0


def test_without_seats_for_two_they_take_turns() -> None:
    params = beams(4)
    engine = fake_engine(max_num_seqs=4)
    found = search(engine, *(beam_request(name, prompt(9, i), params) for i, name in enumerate("abc")))
    assert found == [alone(prompt(9, i), params, 1) for i in range(3)]
    assert engine.stats().blocks.held == 0


def test_others_get_what_they_would_get_alone() -> None:
    engine = fake_engine(40)
    plain = [Sequence(f"p{i}", 1, prompt(6, i), replace(GREEDY, seed=i, temperature=2.0)) for i in range(3)]
    forked = Sequence("f", 1, prompt(7, 7), GREEDY, forks=(Fork("f/1", replace(GREEDY, seed=3)),))
    searches = [beam_request(f"b{i}", prompt(9, i), beams(3), 2) for i in range(2)]
    found = search(engine, plain[0], searches[0], forked, plain[1], searches[1], plain[2])
    assert [found[1], found[4]] == [alone(prompt(9, i), beams(3), 2) for i in range(2)]
    assert [found[at][0].token_ids for at in (0, 3, 5)] == [run_alone(s.prompt_ids, s.params) for s in plain]
    assert found[2][0].token_ids == run_alone(forked.prompt_ids, GREEDY)


def test_an_urgent_search_goes_first_and_the_other_comes_back() -> None:
    params = beams(3, max_tokens=20, stops=frozenset())
    engine = fake_engine(23, priority_aging=100.0)
    low = beam_request("low", prompt(9), params, 3)
    low.priority = Priority(level=1)
    engine.add(low)
    for _ in range(2):
        engine.step()
    high = beam_request("high", prompt(9, 1), params, 3)
    high.priority = Priority(level=-1)
    ended: list[str] = []
    tokens: dict[str, list[int]] = {}
    engine.add(high)
    taken = engine.pool.allocate(8)
    while engine.has_work:
        for output in engine.step():
            if output.new_tokens:
                tokens.setdefault(output.seq.request_id, []).extend(output.new_tokens)
            if output.finish_reason is not None:
                ended.append(output.seq.request_id)
        if taken and "high" in ended:
            engine.pool.free(taken)
            taken = None
    assert ended == ["high", "high/1", "high/2", "low", "low/1", "low/2"]
    for name, salt in (("high", 1), ("low", 0)):
        told = [tokens[f"{name}{suffix}"] for suffix in ("", "/1", "/2")]
        assert told == [answer.token_ids for answer in alone(prompt(9, salt), params, 3)]
    assert engine.stats().scheduler.preemptions > 0


def test_cancelled_it_leaves_nothing() -> None:
    for steps in range(8):
        engine = fake_engine(26)
        engine.add(beam_request("a", prompt(9), beams(3, stops=frozenset()), 2))
        engine.add(beam_request("b", prompt(9, 1), beams(3, stops=frozenset()), 2))
        for _ in range(steps):
            engine.step()
        assert engine.cancel("a", 1)
        assert not engine.cancel("a/1", 1)
        assert search(engine) == []
        assert engine.stats().blocks.held == 0


def test_cancelled_in_the_middle_of_a_pass_it_leaves_nothing() -> None:
    model = HookedModel()
    engine = fake_engine(model=model)
    engine.add(beam_request("a", prompt(9), beams(3, stops=frozenset())))
    for _ in range(3):
        engine.step()
    model.hook = lambda: engine.cancel("a", 1)
    assert engine.step() == []
    assert not engine.has_work
    assert engine.stats().blocks.held == 0


def test_a_newer_attempt_takes_the_place_of_an_older() -> None:
    engine = fake_engine()
    engine.add(beam_request("a", prompt(9), beams(3)))
    for _ in range(4):
        engine.step()
    newer = beam_request("a", prompt(9), beams(3))
    newer.attempt = 2
    assert search(engine, newer) == [alone(prompt(9), beams(3), 1)]
    assert engine.stats().blocks.held == 0


def test_overdue_it_is_named_once() -> None:
    engine = fake_engine()
    request = beam_request("a", prompt(9), beams(3, stops=frozenset()), 3)
    request.priority = Priority(deadline=5.0)
    engine.add(request)
    for _ in range(3):
        engine.step()
    assert engine.overdue(4.0) == []
    assert engine.overdue(6.0) == [request]


def test_a_pass_that_fails_is_taken_again() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    model = HookedModel()
    engine = fake_engine(model=model)
    request = beam_request("a", prompt(10), beams(3), 2)
    engine.add(request)
    for _ in range(2):
        engine.step()
    model.hook = fail
    with pytest.raises(RuntimeError):
        engine.step()
    assert search(engine) == []
    assert engine.stats().blocks.held == 0


class TestRefused:
    def refused(self, engine: Engine, request: Sequence, why: str, error: type[ValueError]) -> None:
        for take in (engine.check, engine.add):
            with pytest.raises(error, match=why):
                take(request)
        assert not engine.has_work

    def test_what_could_never_be_in_the_pool_together(self) -> None:
        # 9 tokens: 2 full blocks shared; 3 beams of 23 tokens: 4 blocks more for each, and 1 to grow into.
        request = beam_request("a", prompt(9), beams(3, max_tokens=14, stops=frozenset()))
        self.refused(fake_engine(16), request, "needs 17 blocks .* has 16", BeamsDoNotFitError)
        assert search(fake_engine(17), request) == [alone(prompt(9), request.params, 1)]

    def test_what_could_never_run_together(self) -> None:
        request = beam_request("a", prompt(9), beams(5))
        self.refused(fake_engine(max_num_seqs=4), request, "5 beams .* at most 4", BeamsDoNotFitError)

    @pytest.mark.parametrize("width", [0, 17])
    def test_too_many_beams(self, width: int) -> None:
        request = beam_request("a", prompt(9), beams(width))
        self.refused(
            fake_engine(2048, max_num_seqs=32), request, f"{width} beams; allowed: 1 to 16", ValueError
        )

    def test_more_answers_than_beams(self) -> None:
        self.refused(fake_engine(), beam_request("a", prompt(9), beams(2), 3), "3 answers", ValueError)

    def test_too_few_tokens_that_go_on(self) -> None:
        stops = frozenset(range(VOCAB_SIZE - 3))
        request = beam_request("a", prompt(9), beams(4, stops=stops))
        self.refused(fake_engine(), request, "as many tokens", ValueError)
        assert search(fake_engine(), beam_request("a", prompt(9), beams(3, stops=stops)))

    @pytest.mark.parametrize(
        ("token_ids", "logprobs", "why"),
        [
            ([5, 6], [-1.0, -2.0], "2 candidates came of 3"),
            ([5, 6, VOCAB_SIZE], [-1.0, -2.0, -3.0], f"allowed: 0 to {VOCAB_SIZE - 1}"),
            ([5, 6, 6], [-1.0, -2.0, -2.0], "a candidate came twice"),
            ([5, 6, 7], [-1.0, -2.0, math.nan], "finite log-probability"),
            ([5, 6, 7], [-1.0, -2.0, -math.inf], "finite log-probability"),
            ([5, 6, 7], [-1.0, -2.0], "finite log-probability"),
        ],
    )
    def test_candidates_of_another_worker_that_cannot_be(
        self, token_ids: list[int], logprobs: list[float], why: str
    ) -> None:
        """They would fail a step, and the worker with it."""
        engine = fake_engine()
        request = beam_request("a", prompt(9), beams(3, stops=frozenset()))
        blocks = engine.pool.allocate(3)
        assert blocks is not None
        with pytest.raises(ValueError, match=why):
            engine.admit_beams(request, Candidates(token_ids, logprobs), arrived(engine, blocks))
        assert not engine.has_work
        assert engine.stats().blocks.held == 0

    def test_what_would_change_the_distribution(self) -> None:
        params = replace(beams(2), frequency_penalty=1.0)
        self.refused(fake_engine(), beam_request("a", prompt(9), params), "own distribution", ValueError)

    def test_outputs_told_before(self) -> None:
        request = Sequence("a", 1, prompt(9), beams(2), [5])
        self.refused(fake_engine(), request, "tells none before its end", ValueError)


def needed(length: int, params: ResolvedSampling) -> int:
    """Blocks of 2 tokens without which a request is refused."""
    width = params.beam_search.width if params.beam_search else 1
    return length // 2 + width * (-(-(length + params.max_tokens) // 2) - length // 2 + 1)


SEARCHES = st.builds(
    beams,
    st.integers(1, 4),
    st.sampled_from([1, 2, 9, 16]),
    st.sampled_from([STOPS, frozenset(), frozenset(range(60))]),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.5]),
    early_stopping=st.sampled_from(EarlyStopping),
)
PLAIN = st.builds(replace, st.just(GREEDY), seed=st.integers(0, 2), temperature=st.sampled_from([0.0, 2.0]))


@pytest.mark.deep
@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 2), st.one_of(SEARCHES, SEARCHES, PLAIN)),
        min_size=2,
        max_size=5,
    ),
    extra=st.integers(0, 6),
    max_num_seqs=st.integers(4, 7),
    budget=st.integers(4, 12),
    chunk=st.sampled_from([1, 2, 5]),
    caching=st.booleans(),
    chunked=st.booleans(),
    priorities=st.lists(st.integers(-1, 1), min_size=5, max_size=5),
    cancelled=st.sets(st.integers(0, 4), max_size=1),
    gap=st.integers(0, 6),
)
def test_random_groups_find_what_they_would_alone(
    requests: list[tuple[int, int, ResolvedSampling]],
    extra: int,
    max_num_seqs: int,
    budget: int,
    chunk: int,
    caching: bool,
    chunked: bool,
    priorities: list[int],
    cancelled: set[int],
    gap: int,
) -> None:
    """In pools that have hardly more blocks than the largest of them is granted."""
    engine = fake_engine(
        max(needed(length, params) for length, _, params in requests) + extra,
        2,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),  # fewer are refused
        prefill_chunk=chunk,
        chunked_prefill=chunked,
        prefix_caching=caching,
        priority_aging=10.0,
    )
    asked = []
    for at, (length, kind, params) in enumerate(requests):
        n = params.beam_search.width if params.beam_search else 1
        request = beam_request(str(at), prompt(length, kind), params, n)
        request.priority = Priority(level=priorities[at])
        asked.append(request)
    engine_step = engine.step
    steps = 0

    def step_and_cancel() -> list[SequenceOutput]:
        nonlocal steps
        steps += 1
        for at in cancelled:
            if steps == 9 + gap and at < len(asked):
                engine.cancel(str(at), 1)
        return engine_step()

    engine.step = step_and_cancel  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {}
    pending = list(asked)
    while engine.has_work or pending:
        assert steps < 3000, engine.stats()
        if pending and steps % (gap + 1) == 0:
            engine.add(pending.pop(0))
        for output in engine.step():
            if output.new_tokens:
                tokens.setdefault(output.seq.request_id, []).extend(output.new_tokens)
    for at, (length, kind, params) in enumerate(requests):
        if at in cancelled:
            continue
        if params.beam_search is None:
            assert tokens[str(at)] == run_alone(prompt(length, kind), params)
            continue
        names = [str(at), *(f"{at}/{i}" for i in range(1, params.beam_search.width))]
        wanted = alone(prompt(length, kind), params, params.beam_search.width)
        assert [tokens[name] for name in names] == [answer.token_ids for answer in wanted]
    load = engine.stats()
    assert (load.blocks.held, load.running, load.waiting) == (0, 0, 0)
    event(f"preempted: {load.scheduler.preemptions > 0}, copied: {load.scheduler.copied_blocks > 0}")


def test_a_beam_comes_back_behind_a_mate_that_a_step_under_way_computes() -> None:
    """Without the mate's blocks the pool has no room for the last of them, and they would wait for ever."""
    engine = fake_engine(
        16, 2, max_num_batched_tokens=12, chunked_prefill=False, prefix_caching=False, ahead="at once"
    )
    plain = Sequence("p", 1, prompt(12), replace(GREEDY, max_tokens=9))
    request = prompt(12, 1), beams(3, max_tokens=2, stops=frozenset())
    found = search(engine, plain, beam_request("b", *request, 3), max_steps=100)
    assert found == [
        [Answer(run_alone(plain.prompt_ids, plain.params), FinishReason.LENGTH)],
        alone(*request, 3),
    ]
    assert engine.stats().scheduler.preemptions > 0
