"""Random histories of an engine with a tiny pool: adds, forks, beam searches, cancels, handoffs in and out,
pins, failing passes, others taking blocks while a pass runs, priorities, a host tier, and a drafter that
drafts anything.

Whatever happens, every request gets the tokens it would get alone, nobody waits for ever, and every block
comes back. ``PROPERTY_EXAMPLES`` (default 100) sets how many histories are tried, ``PROPERTY_STEPS``
(default 50) how long they are.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.block_hash import hash_blocks
from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import SequenceOutput
from baton.engine.execution import PendingStep, StepResult
from baton.engine.kv.arriving import Arriving
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.page_counts import PageCounts
from baton.engine.model import Model
from baton.engine.sampling.beams import Candidates
from baton.engine.scheduler import BeamsDoNotFitError, ScheduledBatch
from baton.engine.sequence import FinishReason, Fork, Sequence, SequenceStatus
from baton.engine.sequence_states import StateMove
from baton.speculation.drafter import TokenSequence
from baton_kernels.paged import PagedBatch
from tests.support.drafters import HostileDrafter
from tests.support.fake_engine import VOCAB_SIZE, Ahead, FakeModel, fake_engine, run_alone
from tests.support.grouped_model import KEPT, GroupedModel, layout_of
from tests.support.oracle_beams import Answer, beam_request, search
from tests.support.runners import runner_of

BLOCK_SIZE = 2
EOS = frozenset(range(3))
PICK = st.integers(0, 1 << 16)
STEP_BOUND = 2000
PRIORITY = st.integers(-2, 2)
WAITED = st.sampled_from([0.0, 0.0, 7.0])
MODES: list[tuple[Ahead, int]] = [
    ("off", 0),
    ("late", 0),
    ("late", 0),
    ("late", 0),
    ("at once", 0),
    ("at once", 0),
    ("off", 1),
    ("late", 3),
    ("off", 16),
]
"""Whether steps are launched ahead, which drafts forbid, and the most drafts of a sequence. Some are more
likely."""


def prompt(kind: int, length: int) -> tuple[int, ...]:
    """Prompts of one kind are prefixes of each other."""
    return tuple((i * i * 31 + kind * 11 + 5) % VOCAB_SIZE for i in range(length))


@lru_cache(maxsize=4096)
def alone(kept: str | None, kind: int, length: int, params: ResolvedSampling) -> tuple[int, ...]:
    return tuple(run_alone(prompt(kind, length), params, EOS, kept))


REQUESTS = st.tuples(
    st.integers(0, 2),
    st.integers(1, 8),
    st.builds(
        ResolvedSampling,
        max_tokens=st.sampled_from([1, 2, 9, 17, 18]),
        seed=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 2.0]),
        ignore_eos=st.booleans(),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.6]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        min_tokens=st.sampled_from([0, 0, 1]),
        bad_word_ids=st.sampled_from([(), (), ((5,), (17, 40))]),
        logprobs=st.sampled_from([None, 1]),
    ),
)


@lru_cache(maxsize=4096)
def found_alone(kept: str | None, kind: int, length: int, params: ResolvedSampling) -> tuple[Answer, ...]:
    assert params.beam_search is not None
    engine = fake_engine(2000, prefix_caching=False, eos_token_ids=EOS, kept=kept)
    [found] = search(engine, beam_request("alone", prompt(kind, length), params, params.beam_search.width))
    return tuple(found)


@lru_cache(maxsize=4096)
def first_candidates(kept: str | None, kind: int, length: int, params: ResolvedSampling) -> Candidates:
    """What may come first in a beam search, from who computed its prompt."""
    engine = fake_engine(2000, eos_token_ids=EOS, kept=kept)
    seq = Sequence("first", 1, prompt(kind, length), params, hold_after_prefill=True)
    engine.add(seq)
    while seq.status is not SequenceStatus.HELD:
        engine.step()
    assert seq.candidates is not None
    return seq.candidates


SEARCHES = st.tuples(
    st.integers(0, 2),
    st.integers(1, 8),
    st.builds(
        ResolvedSampling,
        max_tokens=st.sampled_from([1, 2, 4, 9]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([frozenset[int](), frozenset(range(30))]),
        logprobs=st.sampled_from([None, 1]),
        beam_search=st.builds(
            BeamParams,
            st.sampled_from([1, 2, 2, 2, 3]),
            st.sampled_from([-1.0, 1.0, 2.0]),
            st.sampled_from(EarlyStopping),
        ),
    ),
)


class Fickle(BreakEven):
    """Copying pays when the machine says so."""

    pays = True

    def copying_pays(self, blocks: int) -> bool:
        return self.pays


class MeddlingModel:
    """Lets the machine act when a pass has written."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.after: Callable[[], None] = lambda: None

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        hidden = self.model.forward(token_ids, batch, pool)
        self.after()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class EngineMachine(RuleBasedStateMachine):
    KINDS: ClassVar[Items[str | None]] = (None,)
    """What the layers of the model keep, by the names of ``KEPT``; None: K and V of every token."""

    @initialize(
        num_blocks=st.integers(13, 15),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 12),
        chunk=st.integers(1, 6),
        mixed=st.sampled_from([None, 1, 4]),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        aging=st.sampled_from([None, 0.0, 3.0, 100.0]),
        host_blocks=st.sampled_from([0, 1, 4, 40]),
        mode=st.sampled_from(MODES),
        seed=st.integers(0, 99),
        kind=PICK,
        interval=st.sampled_from([1, 2, 100]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        chunk: int,
        mixed: int | None,
        chunked: bool,
        caching: bool,
        aging: float | None,
        host_blocks: int,
        mode: tuple[Ahead, int],
        seed: int,
        kind: int,
        interval: int,
    ) -> None:
        ahead, num_drafts = mode
        kept = self.KINDS[kind % len(self.KINDS)]
        self.kept = kept
        if kept is not None:  # as many tokens as in the other pools
            layout = layout_of(kept, BLOCK_SIZE)
            num_blocks = PageCounts(layout, budget if chunked else 512).of(num_blocks * BLOCK_SIZE)
            num_blocks += 2 * layout.state_pages
        self.drafter = HostileDrafter(seed, VOCAB_SIZE, wants_hidden=kept is None, truth=self.truth)
        self.break_even = Fickle(BLOCK_SIZE)
        model = FakeModel(VOCAB_SIZE) if kept is None else GroupedModel(layout, VOCAB_SIZE)
        self.model = MeddlingModel(model)
        self.engine = fake_engine(
            num_blocks,
            BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefill_chunk=chunk,
            mixed_prefill_tokens=mixed,
            chunked_prefill=chunked,
            prefix_caching=caching,
            priority_aging=aging,
            host_blocks=host_blocks,
            break_even=self.break_even,
            eos_token_ids=EOS,
            model=self.model,
            drafter=self.drafter if num_drafts else None,
            num_drafts=num_drafts,
            ahead=ahead,
            kept=kept,
        )
        self.engine.scheduler.states._interval = interval
        self.before: Callable[[], None] = lambda: None
        """Called when a step is scheduled, before it touches the pool."""
        runner = self.engine.runner
        run, launcher = runner.run, runner.launcher

        def run_meddled(batch: ScheduledBatch) -> StepResult:
            self.check_seats()
            self.before()
            return run(batch)

        runner.run = run_meddled  # type: ignore[method-assign]
        if launcher is not None:
            launch = launcher.launch

            def launch_meddled(batch: ScheduledBatch) -> PendingStep:
                self.before()
                return launch(batch)

            launcher.launch = launch_meddled  # type: ignore[method-assign]
        self.expected: dict[Sequence, tuple[int, ...]] = {}
        self.unborn: dict[Sequence, dict[str, tuple[int, ...]]] = {}
        """Of those without an output: what their forks will answer, by request."""
        self.searched: dict[Sequence, tuple[Answer, ...]] = {}
        """Of beam searches: what they will find. All of them are in ``expected`` too."""
        self.pinned: list[list[int]] = []
        self.stolen: list[int] = []
        self.names = 0
        self.now = 0.0
        self.aging = aging

    def truth(self, seq: TokenSequence) -> tuple[int, ...]:
        """What is to follow; for one that was cancelled just now, nothing."""
        expected = self.expected.get(seq, ())  # type: ignore[call-overload]
        return tuple(expected[seq.num_tokens - seq.num_prompt :])

    # -- what can happen ---------------------------------------------------------------------------------

    @rule(
        request=REQUESTS,
        hold=st.booleans(),
        seeds=st.lists(st.integers(3, 9), min_size=1, max_size=4),
        priority=PRIORITY,
        waited=WAITED,
    )
    def add_forked(
        self,
        request: tuple[int, int, ResolvedSampling],
        hold: bool,
        seeds: list[int],
        priority: int,
        waited: float,
    ) -> None:
        """A new request with several answers."""
        kind, length, params = request
        seq = Sequence(
            self.name(),
            1,
            prompt(kind, length),
            params,
            hold_after_prefill=hold,
            forks=tuple(Fork(self.name(), replace(params, seed=seed)) for seed in seeds),
            priority=self.prioritized(priority, waited),
        )
        self.expected[seq] = alone(self.kept, kind, length, params)
        self.unborn[seq] = {
            fork.request_id: alone(self.kept, kind, length, fork.params) for fork in seq.forks
        }
        self.engine.add(seq)

    @rule(request=REQUESTS, hold=st.booleans(), given=st.integers(0, 4), priority=PRIORITY, waited=WAITED)
    def add(
        self,
        request: tuple[int, int, ResolvedSampling],
        hold: bool,
        given: int,
        priority: int,
        waited: float,
    ) -> None:
        """A new request, or (``given`` > 0) one that another worker began."""
        kind, length, params = request
        expected = alone(self.kept, kind, length, params)
        outputs = list(expected[: min(given, len(expected) - 1)])
        seq = Sequence(
            self.name(),
            1,
            prompt(kind, length),
            params,
            outputs,
            hold_after_prefill=hold,
            priority=self.prioritized(priority, waited),
        )
        self.expected[seq] = expected
        self.engine.add(seq)

    @rule(request=REQUESTS, priority=PRIORITY, waited=WAITED)
    def receive(self, request: tuple[int, int, ResolvedSampling], priority: int, waited: float) -> None:
        """A request prefilled elsewhere arrives, into promised blocks, reusing what is cached here."""
        kind, length, params = request
        expected = alone(self.kept, kind, length, params)
        if len(expected) < 2:
            return
        prioritized = self.prioritized(priority, waited)
        seq = Sequence(self.name(), 1, prompt(kind, length), params, priority=prioritized)
        arriving = self.arrive(seq)
        if arriving is not None:
            seq.append(expected[0])
            seq.arrive(arriving)
            self.engine.admit_computed(seq)
            self.expected[seq] = expected

    def arrive(self, seq: Sequence) -> Arriving | None:
        """The pages of a prompt come from elsewhere; None if there is no room."""
        engine, length = self.engine, seq.num_prompt
        if not engine.reserve(length, engine.scheduler.turn_of(seq)):
            return None
        engine.unreserve(length)
        arriving = engine.bind_arriving(seq)
        assert arriving is not None
        self.write(seq, arriving)
        return arriving

    def write(self, seq: Sequence, arriving: Arriving) -> None:
        """Writes what another worker has computed of a prompt into the pages that are to receive it."""
        pool = runner_of(self.engine).pool
        if self.kept is None:
            [group] = arriving.groups
            for block in (block for run in group.fresh for block in run):
                for position in range(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, seq.num_prompt)):
                    written = pool[group.pages[block], :, :, :, position % BLOCK_SIZE]
                    written[:, :, 0], written[:, :, 1] = seq.token_ids[position] + 1.0, position + 1.0
            return
        other = fake_engine(2000, BLOCK_SIZE, eos_token_ids=EOS, kept=self.kept, chunked_prefill=False)
        params = ResolvedSampling(max_tokens=2, ignore_eos=True)
        twin = Sequence("twin", 1, seq.prompt_ids, params, hold_after_prefill=True)
        other.add(twin)
        while twin.status is not SequenceStatus.HELD:
            other.step()
        theirs = runner_of(other).pool
        for number, group in enumerate(arriving.groups):
            if group.is_state:
                pool[torch.tensor(group.pages)] = theirs[torch.tensor(twin.state_pages)]
                continue
            assert group.first == twin.num_gone(number)
            for block in (block for run in group.fresh for block in run):
                own = [twin.tables[table][block] for table in group.group.tables]
                pool[torch.tensor(group.pages_of(range(block, block + 1)))] = theirs[torch.tensor(own)]

    @rule(request=SEARCHES, hold=st.booleans(), priority=PRIORITY, waited=WAITED)
    def add_beams(
        self, request: tuple[int, int, ResolvedSampling], hold: bool, priority: int, waited: float
    ) -> None:
        seq = self.searching(request, priority, waited)
        seq.hold_after_prefill = hold
        try:
            self.engine.add(seq)
        except BeamsDoNotFitError:
            return
        self.expected[seq] = ()
        self.searched[seq] = found_alone(self.kept, *request)

    @rule(request=SEARCHES, priority=PRIORITY, waited=WAITED)
    def receive_beams(self, request: tuple[int, int, ResolvedSampling], priority: int, waited: float) -> None:
        """A beam search whose prompt was computed elsewhere begins here."""
        seq = self.searching(request, priority, waited)
        try:
            self.engine.check(seq)
        except BeamsDoNotFitError:
            return
        arriving = self.arrive(seq)
        if arriving is not None:
            self.engine.admit_beams(seq, first_candidates(self.kept, *request), arriving)
            self.expected[seq] = ()
            self.searched[seq] = found_alone(self.kept, *request)
            if seq.status is SequenceStatus.FINISHED:  # it is told with the next step
                del self.expected[seq]

    def searching(self, request: tuple[int, int, ResolvedSampling], priority: int, waited: float) -> Sequence:
        kind, length, params = request
        assert params.beam_search is not None
        seq = beam_request(self.name(), prompt(kind, length), params, params.beam_search.width)
        seq.priority = self.prioritized(priority, waited)
        return seq

    @precondition(lambda self: self.expected)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        seq = list(self.expected)[pick % len(self.expected)]
        assert not self.engine.cancel(seq.request_id, 0)
        assert self.engine.cancel(seq.request_id, 1)
        assert not self.engine.cancel(seq.request_id, 1)
        assert seq.finish_reason is FinishReason.CANCELLED
        self.forget(seq)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        held = sorted(self.engine.scheduler.held, key=lambda seq: seq.arrival)
        if held:
            self.release_one(held[pick % len(held)])

    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        """A transfer begins to read a sequence's blocks."""
        owners = [seq for seq in self.expected if seq.block_ids]
        if owners:
            blocks = list(owners[pick % len(owners)].held_pages())
            self.engine.pool.pin(blocks)
            self.pinned.append(blocks)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.engine.pool.unpin(self.pinned.pop())

    @rule(pays=st.booleans())
    def weigh(self, pays: bool) -> None:
        self.break_even.pays = pays

    @rule(steps=st.integers(1, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    @precondition(lambda self: self.expected)
    @rule(pick=PICK, fail=st.booleans())
    def cancel_during_a_step(self, pick: int, fail: bool) -> None:
        """While a pass runs, a request is cancelled and somebody takes and overwrites all blocks he gets."""
        seq = list(self.expected)[pick % len(self.expected)]
        engine = self.engine

        def before() -> None:
            self.before = lambda: None
            in_use = {block for s in engine.scheduler.running for block in s.held_pages()}
            assert engine.cancel(seq.request_id, 1)
            self.forget(seq)
            blocks = engine.pool.allocate(engine.pool.num_allocatable)
            assert blocks is not None
            engine.copy_blocks()
            in_flight = {block for s in self.computed() for block in s.held_pages()}
            assert in_flight <= in_use or engine.launcher is not None
            assert in_flight.isdisjoint(blocks)
            self.stolen = blocks
            self.scribble(blocks)

        def after() -> None:
            assert bool((runner_of(engine).pool[self.stolen] == -9.0).all())
            if fail:
                raise RuntimeError("the pass failed")

        self.before, self.model.after = before, after
        try:
            self.one_step()
        except RuntimeError:
            assert fail
            assert engine._under_way is None or engine.launcher is not None
        self.before = self.model.after = lambda: None
        engine.pool.free(self.stolen)
        self.stolen = []
        assert (seq in self.expected) == (seq.status is not SequenceStatus.FINISHED)

    @precondition(lambda self: self.engine.computing)
    @rule(pick=PICK, most=st.integers(1, 3), more=st.booleans())
    def cancel_under_two_steps(self, pick: int, most: int, more: bool) -> None:
        """Requests are cancelled when the next step is launched and the tokens of this one are not here yet.
        ``more``: the step after them is launched ahead too, as they end."""

        def before() -> None:
            self.before = lambda: None
            here = sorted(self.expected, key=lambda seq: -seq.steps_under_way)
            deepest = [seq for seq in here if seq.steps_under_way == here[0].steps_under_way]
            for seq in (deepest[pick % len(deepest) :] + deepest)[: min(most, len(deepest))]:
                assert self.engine.cancel(seq.request_id, 1)
                self.forget(seq)

        self.before = before
        self.one_step()
        self.before = lambda: None
        if more:
            self.one_step()

    # -- what must then hold -----------------------------------------------------------------------------

    def computed(self) -> list[Sequence]:
        """The sequences of the step under way."""
        step = self.engine._under_way
        return [] if step is None else [item.sequence for item in step.batch.items]

    def moves(self) -> tuple[StateMove, ...]:
        """What the step under way does with states."""
        step = self.engine._under_way
        return () if step is None else step.batch.moves

    def one_step(self) -> list[SequenceOutput]:
        self.now += 1
        before = {seq: (seq.num_outputs, seq.num_computed) for seq in self.expected}
        scheduler = self.engine.scheduler
        seated = sorted((*scheduler.running, *scheduler.joining), key=lambda seq: seq.place)
        losses = [seq.preemptions for seq in seated[:1]]
        outputs = self.engine.step()
        if not any(seq.mates for seq in seated):  # beams that wait for a mate hold up nobody before them
            assert [seq.preemptions for seq in seated[:1]] == losses, "the first in order was preempted"
        searched = [out for out in outputs if out.seq.params.beam_search is not None]
        outputs = [out for out in outputs if out.seq.params.beam_search is None]
        self.follow_searches(searched)
        assert len({out.seq for out in outputs}) == len(outputs)
        for out in outputs:
            seq = out.seq
            if out.new_tokens and seq in self.unborn:
                self.bear(seq, outputs)
            expected = self.expected[seq]
            assert tuple(seq.output_ids) == expected[: seq.num_outputs]
            assert seq.num_outputs == before.get(seq, (0, 0))[0] + len(out.new_tokens)
            assert out.advanced_to <= seq.num_tokens
            if seq.status is SequenceStatus.HELD:
                assert out.new_tokens or before[seq][0]
            elif seq.status is SequenceStatus.FINISHED and out.finish_reason is None:
                del self.expected[seq]  # a fork of one that is held: it goes on elsewhere
            elif out.finish_reason is not None:
                assert tuple(seq.output_ids) == expected
                assert out.finish_reason is seq.finish_reason
                del self.expected[seq]
            else:
                assert not out.new_tokens or not seq.hold_after_prefill
        self.check_books()
        return outputs + searched

    def follow_searches(self, outputs: list[SequenceOutput]) -> None:
        """Each is told nothing before its end, and then all that it would find alone."""
        found: dict[str, list[SequenceOutput]] = {}
        for out in outputs:
            assert out.error is None
            if out.new_tokens:
                found.setdefault(out.seq.request_id, []).append(out)
        for seq, answers in list(self.searched.items()):
            names = [seq.request_id, *(fork.request_id for fork in seq.forks)]
            if names[0] not in found:
                continue
            for name, answer in zip(names, answers, strict=True):
                told = found.pop(name)
                assert [token for out in told for token in out.new_tokens] == answer.token_ids
                assert [out.finish_reason for out in told[:-1]] == [None] * (len(told) - 1)
                assert told[-1].finish_reason is answer.finish_reason
                assert [out.advanced_to - seq.num_prompt for out in told] == list(range(len(told)))
            del self.searched[seq]
            self.expected.pop(seq, None)
        assert not found

    def bear(self, seq: Sequence, outputs: list[SequenceOutput]) -> None:
        """With its first token a sequence has its forks, each with its own."""
        for number, (request_id, expected) in enumerate(self.unborn.pop(seq).items(), start=1):
            [fork] = [out.seq for out in outputs if out.seq.request_id == request_id]
            assert fork.place == (seq.place[0], seq.place[1] + number)
            assert fork.priority == seq.priority
            self.expected[fork] = expected

    def forget(self, seq: Sequence) -> None:
        del self.expected[seq]
        self.unborn.pop(seq, None)
        self.searched.pop(seq, None)

    def check_seats(self) -> None:
        """In a step, who holds blocks and has no seat is behind everyone with one, and none is free."""
        scheduler = self.engine.scheduler
        if scheduler.joining:
            assert len(scheduler.running) == scheduler.limits.max_num_seqs
            assert scheduler.running[-1].place < scheduler.joining[0].place

    def check_books(self) -> None:
        """The pool's counts are the sum of what sequences and transfers hold; blocks without content are
        overwritten, so that whoever still reads them gets other tokens."""
        engine, pool = self.engine, self.engine.pool
        scheduler = engine.scheduler
        here = {*scheduler.running, *scheduler.waiting, *scheduler.joining, *scheduler.held}
        assert here == {one for seq in self.expected for one in seq.mates or (seq,)}
        assert len(engine._groups) == sum(bool(seq.mates) for seq in self.expected)
        assert len(scheduler.running) <= scheduler.limits.max_num_seqs
        assert scheduler._waiting_tokens == sum(seq.num_expected for seq in scheduler.waiting)
        assert all(0 < seq.num_expected <= seq.num_tokens for seq in scheduler.waiting)
        for queue in (scheduler.running, scheduler.joining, scheduler.waiting):
            assert [s.place for s in queue] == sorted(s.place for s in queue)
        if self.aging is None:
            assert all(s.place == (0.0, s.arrival) for s in here)
        refs = array("q", [0] * pool.num_blocks)
        for block in (*self.stolen, *(copy.source for copy in scheduler._copies)):
            refs[block] += 1
        for move in self.moves():
            kept = [run.target for number, run in enumerate(move.runs) if run.block and number != move.live]
            for page in (*move.released, *(page for pages in kept for page in pages)):
                refs[page] += 1
        computed = self.computed()
        for seq in {*here, *computed}:
            assert seq.num_scheduled <= len(seq.block_ids) * BLOCK_SIZE
            assert seq.steps_under_way == (seq in computed)
            assert seq.steps_under_way or not (seq.num_under_way or seq.num_pending)
            assert seq.hashes == hash_blocks(seq.token_ids, BLOCK_SIZE)[: len(seq.hashes)]
            for block in seq.held_pages():
                refs[block] += 1
        assert list(refs) == [pool.refs(block) for block in range(pool.num_blocks)]
        self.scribble([b for b in range(pool.num_blocks) if pool.allocatable(b) and pool._digests[b] is None])

    def scribble(self, blocks: list[int]) -> None:
        runner_of(self.engine).pool[torch.tensor(blocks, dtype=torch.int64)] = -9.0

    def release_one(self, seq: Sequence) -> None:
        assert self.engine.release(seq)
        assert not self.engine.release(seq)
        self.forget(seq)

    def prioritized(self, priority: int, waited: float) -> Priority:
        return Priority(0 if self.aging is None else priority, self.now - waited)

    def name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def teardown(self) -> None:
        """Everybody comes to an end in a bounded number of steps, and every block comes back."""
        if not hasattr(self, "engine"):
            return
        for blocks in self.pinned:
            self.engine.pool.unpin(blocks)
        for _ in range(STEP_BOUND):
            for seq in list(self.engine.scheduler.held):
                self.release_one(seq)
            if not self.expected:
                break
            # With nothing held, pinned or promised, every step makes progress, unless all of it is surplus.
            surplus = self.engine.computing
            assert self.one_step() or surplus
        while self.engine.has_work:  # searches that were over as they came, and surplus
            self.one_step()
        assert not self.expected
        assert not self.searched
        assert not self.engine.has_work
        assert not self.engine._sequences
        if self.engine.speculator is not None:
            self.engine.speculator.forget_ended()
            assert not self.engine.speculator._records
            assert not self.drafter.alive
        pool = self.engine.pool
        assert pool.num_held == 0
        assert self.engine.stats().waiting_prefill_tokens == 0


class GroupsMachine(EngineMachine):
    KINDS = tuple(KEPT)


EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "100"))
OF_GROUPS = 3
"""One history of models with groups for so many of others: these models take longer."""

TestEngine = EngineMachine.TestCase
TestGroups = pytest.mark.deep(GroupsMachine.TestCase)
TestEngine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=int(os.environ.get("PROPERTY_STEPS", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGroups.settings = settings(TestEngine.settings, max_examples=max(1, EXAMPLES // OF_GROUPS))
