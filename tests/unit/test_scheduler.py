"""The scheduler alone: what goes into a step, in which order, and who must yield."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import pytest

from baton.core.sampling_params import ResolvedSampling
from baton.engine.kv.block_pool import BlockPool
from baton.engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from baton.engine.sequence import FinishReason, Sequence, SequenceStatus

BLOCK_SIZE = 4


def scheduler(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    budget: int = 16,
    chunk: int = 8,
    max_model_len: int = 200,
    chunked_prefill: bool = True,
    prefix_caching: bool = True,
    mixed: int | None = None,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs,
        budget,
        chunk,
        max_model_len,
        chunked_prefill,
        prefix_caching,
        mixed_prefill_tokens=mixed,
    )
    return Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE))


def sequence(name: str, prompt: int | Ids[int], max_tokens: int = 50) -> Sequence:
    ids = range(sum(name.encode()), sum(name.encode()) + prompt) if isinstance(prompt, int) else prompt
    return Sequence(name, 1, list(ids), ResolvedSampling(max_tokens=max_tokens))


def names(batch: ScheduledBatch) -> list[tuple[str, int]]:
    return [(seq.request_id, num_new) for seq, num_new, *_ in batch.items]


def step(s: Scheduler) -> list[tuple[str, int]]:
    """Schedules a step and pretends it was computed; every sequence that is due gets a token."""
    batch = s.schedule()
    for seq, num_new, *_ in batch.items:
        s.advance(seq, num_new)
        if seq.num_uncomputed == 0:
            seq.append(1000 + seq.num_outputs)
    return names(batch)


class TestOrder:
    def test_long_prompts_go_in_chunks_under_the_budget(self) -> None:
        s = scheduler(budget=16, chunk=8)
        s.add(sequence("a", 20))
        s.add(sequence("b", 20))
        s.add(sequence("c", 20))
        assert step(s) == [("a", 8), ("b", 8)]
        assert step(s) == [("a", 8), ("b", 8)]
        assert step(s) == [("a", 4), ("b", 4), ("c", 8)]

    def test_beside_decodes_prompts_take_their_share_and_alone_all_of_it(self) -> None:
        s = scheduler(budget=16, chunk=8, mixed=6)
        s.add(sequence("a", 4))
        assert step(s) == [("a", 4)]
        s.add(sequence("b", 18))
        s.add(sequence("c", 20))
        assert step(s) == [("a", 1), ("b", 6)]
        assert step(s) == [("a", 1), ("b", 6)]
        s.finish(s.running[0], FinishReason.STOP)
        assert step(s) == [("b", 6), ("c", 8)]

    def test_a_whole_prompt_is_not_cut_to_its_share(self) -> None:
        s = scheduler(budget=16, chunked_prefill=False, mixed=6)
        s.add(sequence("a", 4))
        step(s)
        s.add(sequence("b", 12))
        assert step(s) == [("a", 1), ("b", 12)]

    def test_what_is_cached_does_not_wait_to_be_computed(self) -> None:
        s = scheduler(max_num_seqs=1)
        s.add(sequence("a", list(range(12))))
        s.add(sequence("b", 10))
        assert s.waiting_prefill_tokens == 22
        step(s)
        step(s)  # "a" is computed: three blocks
        again = sequence("c", list(range(16)))
        again.extend_hashes(BLOCK_SIZE)
        s.add(again)
        assert s.waiting_prefill_tokens == 10 + 4
        s.finish(again, FinishReason.CANCELLED)
        assert s.waiting_prefill_tokens == 10

    def test_decodes_come_first_and_always(self) -> None:
        s = scheduler(budget=8, chunk=8, max_num_seqs=8)
        for name in "abcd":
            s.add(sequence(name, 2))
        assert step(s) == [(name, 2) for name in "abcd"]
        s.add(sequence("long", 40))
        for _ in range(10):
            assert step(s) == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("long", 4)]
        assert step(s) == [(name, 1) for name in ("a", "b", "c", "d", "long")]

    def test_single_tokens_precede_chunks_in_the_batch(self) -> None:
        s = scheduler(budget=16, chunk=8)
        s.add(sequence("a", 12))
        s.add(sequence("b", 1))
        batch = s.schedule()
        assert names(batch) == [("b", 1), ("a", 8)]
        assert batch.num_single == 1

    def test_seats_are_limited_and_given_in_order_of_arrival(self) -> None:
        s = scheduler(max_num_seqs=2)
        seqs = [sequence(name, 4) for name in "abc"]
        for seq in seqs:
            s.add(seq)
        assert step(s) == [("a", 4), ("b", 4)]
        s.finish(seqs[0], FinishReason.STOP)
        assert step(s) == [("b", 1), ("c", 4)]

    def test_a_large_request_is_not_overtaken(self) -> None:
        s = scheduler(num_blocks=8)
        s.add(sequence("a", 16))
        step(s)
        s.add(sequence("large", 24))
        s.add(sequence("small", 2))
        assert step(s) == [("a", 8)]
        assert [seq.request_id for seq in s.waiting] == ["large", "small"]

    def test_unchunked_prompts_go_whole_even_above_the_budget(self) -> None:
        s = scheduler(budget=16, chunk=8, chunked_prefill=False)
        for name, length in (("a", 10), ("b", 8), ("c", 30), ("d", 3)):
            s.add(sequence(name, length))
        assert step(s) == [("a", 10)]
        assert step(s) == [("a", 1), ("b", 8)]
        assert step(s) == [("a", 1), ("b", 1), ("c", 30)]
        assert step(s) == [("a", 1), ("b", 1), ("c", 1), ("d", 3)]


class TestPrefixes:
    def test_cached_blocks_are_not_computed_again(self) -> None:
        s = scheduler(budget=64, chunk=64)
        first = sequence("a", range(20))
        s.add(first)
        step(s)
        second = sequence("b", [*range(18), 99, 98])
        s.add(second)
        assert step(s) == [("a", 1), ("b", 4)]
        assert second.num_cached == 16
        assert list(second.block_ids[:4]) == list(first.block_ids[:4])
        assert s.pool.refs(first.block_ids[0]) == 2
        assert (s.counters.prefix_queried_tokens, s.counters.prefix_hit_tokens) == (40, 16)

    def test_the_last_token_is_always_computed(self) -> None:
        s = scheduler(budget=64, chunk=64)
        s.add(sequence("a", range(8)))
        step(s)
        again = sequence("b", range(8))
        s.add(again)
        assert step(s) == [("a", 1), ("b", 4)]
        assert again.num_cached == 4

    def test_salts_keep_tenants_apart(self) -> None:
        s = scheduler(budget=64, chunk=64)
        params = ResolvedSampling(max_tokens=5)
        for name in ("a", "b"):
            s.add(Sequence(name, 1, list(range(8)), params, cache_salt=name.encode()))
            step(s)
        assert s.counters.prefix_hit_tokens == 0

    def test_off_means_off(self) -> None:
        s = scheduler(prefix_caching=False)
        for name in ("a", "b"):
            s.add(sequence(name, range(8)))
            step(s)
        assert s.counters.prefix_queried_tokens == 0
        for seq in list(s.running):
            s.finish(seq, None)
        assert s.pool.num_free == 64


class TestWantOfBlocks:
    def test_the_latest_arrival_is_preempted_and_comes_back_first(self) -> None:
        s = scheduler(num_blocks=7, prefix_caching=False)
        a, b = sequence("a", 8), sequence("b", 8)
        s.add(a)
        s.add(b)
        assert step(s) == [("a", 8), ("b", 8)]
        late = sequence("late", 2)
        s.add(late)
        while s.counters.preemptions == 0:
            step(s)
        assert (b.status, len(b.block_ids), b.num_computed, b.preemptions) == (
            SequenceStatus.WAITING,
            0,
            0,
            1,
        )
        assert s.waiting == [b, late]
        outputs = list(b.output_ids)
        s.finish(a, FinishReason.STOP)
        step(s)
        assert b.status is SequenceStatus.RUNNING
        assert b.output_ids == outputs
        assert b.num_computed == 8

    def test_the_latest_itself_pauses_and_keeps_its_blocks(self) -> None:
        s = scheduler(num_blocks=5, prefix_caching=False)
        a, b = sequence("a", 5), sequence("b", 4)
        s.add(a)
        step(s)
        s.add(b)
        for _ in range(5):
            assert len(step(s)) == 2
        assert (a.num_computed, b.num_computed, s.pool.num_allocatable) == (10, 8, 0)
        for _ in range(2):
            assert step(s) == [("a", 1)]
            assert (b.status, len(b.block_ids)) == (SequenceStatus.RUNNING, 2)
        assert step(s) == [("a", 1)]
        assert (b.status, len(b.block_ids), s.counters.preemptions) == (SequenceStatus.WAITING, 0, 1)

    def test_held_sequences_are_never_preempted(self) -> None:
        s = scheduler(num_blocks=6, prefix_caching=False)
        a, b = sequence("a", 8), sequence("b", 8)
        s.add(a)
        s.add(b)
        step(s)
        s.hold(b)
        for _ in range(30):
            step(s)
        assert b.status is SequenceStatus.HELD
        assert len(b.block_ids) == 2
        assert s.counters.preemptions == 0
        assert a.num_tokens == 17  # its four blocks are full
        assert step(s) == []
        s.finish(b, None)
        assert step(s) == [("a", 1)]

    def test_a_prompt_takes_what_there_is(self) -> None:
        s = scheduler(num_blocks=8, budget=64, chunk=64, prefix_caching=False)
        a = sequence("a", 28)
        s.add(a)
        taken = s.pool.allocate(1)
        assert taken is not None
        s.schedule()  # all seven others are bound
        assert len(a.block_ids) == 7

    def test_prompts_begun_are_counted_before_others_start(self) -> None:
        s = scheduler(num_blocks=10, budget=16, chunk=4)
        s.add(sequence("a", 28))
        s.add(sequence("b", 12))
        assert step(s) == [("a", 4)]

    def test_a_sequence_alone_uses_every_block(self) -> None:
        s = scheduler(num_blocks=4)
        s.add(sequence("a", 15))
        for _ in range(2):
            step(s)
        assert s.pool.num_held == 4


class TestHandoffs:
    def test_nobody_starts_in_reserved_blocks(self) -> None:
        s = scheduler(num_blocks=4)
        assert s.reserve(2)
        s.add(sequence("a", 12))
        assert step(s) == []
        s.reserved_blocks = 0
        assert step(s) == [("a", 8)]

    def test_running_sequences_grow_into_reserved_blocks(self) -> None:
        s = scheduler(num_blocks=5)
        s.add(sequence("a", 8))
        step(s)
        assert s.reserve(1)
        assert not s.reserve(1)  # a needs one now and one to grow
        for _ in range(12):
            assert step(s) == [("a", 1)]
        assert s.pool.num_allocatable == 0

    def test_nothing_is_promised_while_somebody_waits(self) -> None:
        s = scheduler(num_blocks=16, max_num_seqs=1)
        s.add(sequence("a", 4))
        step(s)
        s.add(sequence("b", 4))
        assert not s.reserve(1)

    def arrived(self, s: Scheduler, name: str, num_tokens: int) -> Sequence:
        seq = Sequence(name, 1, list(range(num_tokens - 1)), ResolvedSampling(max_tokens=50), [7])
        blocks = s.pool.allocate(-(-(num_tokens - 1) // BLOCK_SIZE))
        assert blocks is not None
        seq.bind(blocks)
        return seq

    def test_a_computed_sequence_decodes_at_once_and_its_prefix_is_shared(self) -> None:
        s = scheduler()
        seq = self.arrived(s, "a", 10)
        s.admit_computed(seq)
        assert step(s) == [("a", 1)]
        s.add(sequence("b", range(9)))
        assert step(s) == [("a", 1), ("b", 1)]

    def test_without_a_seat_it_keeps_its_blocks_and_precedes_waiting_ones(self) -> None:
        s = scheduler(max_num_seqs=1)
        running = sequence("a", 4)
        s.add(running)
        step(s)
        s.add(sequence("b", 4))
        computed = self.arrived(s, "c", 6)
        s.admit_computed(computed)
        assert step(s) == [("a", 1)]
        assert computed.status is SequenceStatus.WAITING
        assert len(computed.block_ids) == 2
        s.finish(running, FinishReason.STOP)
        assert step(s) == [("c", 1)]

    def test_without_a_seat_it_gives_its_blocks_to_who_has_one(self) -> None:
        s = scheduler(num_blocks=5, max_num_seqs=1, prefix_caching=False)
        running = sequence("a", 8)
        s.add(running)
        step(s)
        computed = self.arrived(s, "b", 9)
        s.admit_computed(computed)
        for _ in range(8):
            assert step(s) == [("a", 1)]
        assert s.counters.preemptions == 1
        assert s.waiting == [computed]
        s.finish(running, FinishReason.STOP)
        assert step(s) == [("b", 8)]

    def test_blocks_must_match_the_tokens(self) -> None:
        s = scheduler()
        seq = self.arrived(s, "a", 10)
        seq.block_ids.pop()
        with pytest.raises(ValueError, match="2 blocks and 1 outputs with 10 tokens; expected 3 blocks"):
            s.admit_computed(seq)

    def test_an_older_prompt_takes_the_place_of_a_younger_decode_in_the_same_step(self) -> None:
        s = scheduler(num_blocks=6, chunk=2, prefix_caching=False)
        s.add(sequence("old", 16))
        step(s)
        young = self.arrived(s, "young", 10)
        s.admit_computed(young)
        for _ in range(3):
            assert step(s) == [("young", 1), ("old", 2)]
        assert (young.num_tokens, s.pool.num_allocatable) == (13, 1)
        assert step(s) == [("old", 2)]
        assert (young.status, s.counters.preemptions) == (SequenceStatus.WAITING, 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "outputs", "max_tokens", "message"),
        [
            ([], [], 5, "the prompt is empty"),
            ([1], [], 0, "max_tokens is 0 and 0 outputs were given"),
            ([1], [2, 3], 2, "max_tokens is 2 and 2 outputs were given"),
            ([1] * 30, [], 5, "30 tokens and one more exceed max_model_len 30"),
            ([1] * 16, [], 5, "16 tokens and one more exceed the KV cache of 16 tokens .4 blocks of 4."),
        ],
    )
    def test_what_could_never_run(
        self, prompt: list[int], outputs: list[int], max_tokens: int, message: str
    ) -> None:
        s = scheduler(num_blocks=4, max_model_len=30)
        with pytest.raises(ValueError, match=message):
            s.add(Sequence("r", 1, prompt, ResolvedSampling(max_tokens=max_tokens), outputs))
        assert not s.has_work

    def test_what_cannot_finish_is_limited(self) -> None:
        s = scheduler(num_blocks=4, max_model_len=30)
        seq = sequence("a", 10, max_tokens=100)
        s.add(seq)
        assert seq.max_len == 16
