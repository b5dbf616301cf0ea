"""The engine over a model whose tokens depend on every K and V in sight, and over a real small one."""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from baton.core.beam_search import BeamParams
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import FinishReason, Sequence, SequenceStatus
from baton.engine.startup import launches_ahead
from baton.engine.step import StepTensors
from baton.request.limits import MAX_PROMPT_LOGPROBS
from baton_kernels.paged import PagedBatch
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine, run, run_alone
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.usefixtures("launched")

T = TypeVar("T")
GREEDY = ResolvedSampling(max_tokens=12, temperature=0.0)
DRAWN = ResolvedSampling(max_tokens=12, seed=3, temperature=2.0, top_p=0.95)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + i * 17 + salt * 7 + 5) % VOCAB_SIZE for i in range(length)]


class HookedModel(FakeModel):
    """Calls ``hook`` in the middle of its forward pass, once."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.hook: Callable[[], object] | None = None

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return super().forward(token_ids, batch, pool)


def elsewhere(function: Callable[[], T]) -> T:
    """Calls ``function`` on another thread, which must not have to wait."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "blocked"
    return results[0]


class TestTokens:
    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"prefill_chunk": 3},
            {"prefill_chunk": 1},
            {"chunked_prefill": False, "prefill_chunk": 1},
            {"prefix_caching": False},
            {"max_num_batched_tokens": 9, "max_num_seqs": 3},
            {"num_blocks": 12, "block_size": 5},
        ],
        ids=str,
    )
    def test_do_not_depend_on_how_they_are_computed(
        self, settings: dict[str, int], params: ResolvedSampling
    ) -> None:
        engine = fake_engine(**settings)  # type: ignore[arg-type]
        prompts = [prompt(1), prompt(4), prompt(23), prompt(30), prompt(30, salt=1), prompt(23)]
        outputs = run(engine, *(Sequence(str(i), 1, p, params) for i, p in enumerate(prompts)))
        assert outputs == [run_alone(p, params) for p in prompts]
        assert engine.stats().blocks.held == 0

    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    def test_go_on_where_another_worker_stopped(self, params: ResolvedSampling) -> None:
        whole = run_alone(prompt(21), params)
        for given in range(1, params.max_tokens):
            seq = Sequence("r", 2, prompt(21), params, whole[:given])
            assert run(fake_engine(), seq) == [whole]
            assert seq.resumed_from == given

    def test_survive_preemption(self) -> None:
        engine = fake_engine(num_blocks=12)
        params = ResolvedSampling(max_tokens=30, seed=8, top_p=0.9)
        prompts = [prompt(5, salt=i) for i in range(6)]
        outputs = run(engine, *(Sequence(str(i), 1, p, params) for i, p in enumerate(prompts)))
        assert engine.stats().scheduler.preemptions > 0
        assert outputs == [run_alone(p, params) for p in prompts]

    def test_are_the_same_after_a_hit_in_the_prefix_cache(self) -> None:
        engine = fake_engine()
        [first] = run(engine, Sequence("a", 1, prompt(30), DRAWN))
        again = Sequence("b", 1, prompt(30), DRAWN)
        assert run(engine, again) == [first]
        assert again.num_cached == 28
        # The answer is cached too: a second turn of a conversation starts behind it.
        turn = Sequence("c", 1, prompt(30) + first + [1, 2, 3], DRAWN)
        run(engine, turn)
        assert turn.num_cached == (30 + 11) // 4 * 4
        counted = engine.stats().scheduler
        assert (counted.prefix_queried_tokens, counted.prefix_hit_tokens) == (30 + 30 + 45, 28 + 40)


class TestStopping:
    def finish(self, params: ResolvedSampling, eos: int | None = None, **settings: int) -> Sequence:
        engine = fake_engine(eos_token_ids=frozenset() if eos is None else frozenset([eos]), **settings)  # type: ignore[arg-type]
        seq = Sequence("r", 1, prompt(10), params)
        run(engine, seq)
        assert seq.status is SequenceStatus.FINISHED
        assert engine.stats().blocks.held == 0
        return seq

    def first_new(self) -> int:
        """Index of the first output beyond the first that did not occur before it."""
        tokens = run_alone(prompt(10), GREEDY)
        return next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])

    def test_at_max_tokens(self) -> None:
        seq = self.finish(GREEDY)
        assert (seq.num_outputs, seq.finish_reason) == (12, FinishReason.LENGTH)

    def test_at_the_end_of_sequence_unless_ignored(self) -> None:
        at = self.first_new()
        eos = run_alone(prompt(10), GREEDY)[at]
        seq = self.finish(GREEDY, eos)
        assert (seq.num_outputs, seq.finish_reason) == (at + 1, FinishReason.STOP)
        ignoring = ResolvedSampling(max_tokens=12, temperature=0.0, ignore_eos=True)
        assert self.finish(ignoring, eos).num_outputs == 12

    def test_at_a_stop_token_even_if_the_end_is_ignored(self) -> None:
        at = self.first_new()
        token = run_alone(prompt(10), GREEDY)[at]
        params = ResolvedSampling(
            max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset([token])
        )
        seq = self.finish(params, token)
        assert (seq.num_outputs, seq.finish_reason) == (at + 1, FinishReason.STOP)

    def test_at_the_end_of_the_context_or_of_the_pool(self) -> None:
        for settings in ({"max_model_len": 16}, {"num_blocks": 4}):
            seq = self.finish(GREEDY, **settings)
            assert (seq.num_tokens, seq.finish_reason) == (16, FinishReason.LENGTH)


class TestOutputs:
    def test_tell_how_far_a_prompt_has_got(self) -> None:
        engine = fake_engine(prefill_chunk=8)
        seq = Sequence("r", 1, prompt(20), GREEDY)
        engine.add(seq)
        seen = [(out.advanced_to, not out.new_tokens) for _ in range(4) for out in engine.step()]
        assert seen == [(8, True), (16, True), (20, False), (21, False)]
        assert engine.stats().generated_tokens == 2

    def test_load_counts_what_is_to_be_computed(self) -> None:
        engine = fake_engine(prefill_chunk=8, max_num_seqs=1, ahead="off")
        for name in "ab":
            engine.add(Sequence(name, 1, prompt(20), GREEDY))
        assert engine.stats().waiting_prefill_tokens == 40
        engine.step()
        load = engine.stats()
        assert (load.running, load.waiting, load.waiting_prefill_tokens) == (1, 1, 32)
        assert (load.blocks.free, load.blocks.cached, load.blocks.held) == (62, 0, 2)

    def test_token_ids_must_be_in_the_vocabulary(self) -> None:
        engine = fake_engine()
        for bad in (-1, VOCAB_SIZE):
            with pytest.raises(ValueError, match=f"allowed: 0 to {VOCAB_SIZE - 1}"):
                engine.add(Sequence("r", 1, [5, bad], GREEDY))
        assert not engine.has_work

    def test_parameters_must_be_of_the_vocabulary_and_leave_a_choice(self) -> None:
        engine = fake_engine(eos_token_ids=frozenset({3}))
        beyond = (VOCAB_SIZE,)
        for params, message in (
            (replace(GREEDY, allowed_token_ids=beyond), f"allowed: 0 to {VOCAB_SIZE - 1}"),
            (replace(GREEDY, bad_word_ids=((1,), beyond)), f"allowed: 0 to {VOCAB_SIZE - 1}"),
            (replace(GREEDY, logit_bias=((VOCAB_SIZE, 1.0),)), f"allowed: 0 to {VOCAB_SIZE - 1}"),
            (replace(GREEDY, min_tokens=1, stop_token_ids=frozenset(beyond)), "allowed: 0 to"),
            (replace(GREEDY, min_tokens=1, allowed_token_ids=(3,)), "leave no token"),
            (replace(GREEDY, bad_word_ids=((1,), ())), "a run of bad_word_ids is empty"),
        ):
            for accept in (engine.check, engine.add):
                with pytest.raises(ValueError, match=message):
                    accept(Sequence("r", 1, [5], params))
        assert not engine.has_work

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("temperature", (math.nan, math.inf, -0.1, 1e30)),
            ("top_k", (-1,)),
            ("top_p", (math.nan, math.inf, -0.1, 1.1)),
            ("min_p", (math.nan, math.inf, -0.1, 1.1)),
            ("repetition_penalty", (math.nan, math.inf, 0.0, -1.0, 1e-30, 1e30)),
            ("presence_penalty", (math.nan, -math.inf, 2.1)),
            ("frequency_penalty", (math.nan, -math.inf, 2.1)),
            ("min_tokens", (-1,)),
            ("logprobs", (-1,)),
            ("prompt_logprobs", (-1,)),
        ],
    )
    def test_numbers_must_be_within_their_bounds(self, name: str, wrong: tuple[float, ...]) -> None:
        """A step that cannot choose, or makes something of NaN, would end the worker."""
        engine = fake_engine()
        for value in wrong:
            params: dict[str, Any] = {name: value}
            with pytest.raises(ValueError, match=re.escape(f"{name} is {value}; allowed: ")):
                engine.add(Sequence("r", 1, [5], replace(GREEDY, **params)))
        assert not engine.has_work

    @pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 101.0])
    def test_a_bias_must_be_finite_and_small(self, bias: float) -> None:
        with pytest.raises(ValueError, match=r"logit_bias\[3\] is .*; allowed: -100 to 100"):
            fake_engine().add(Sequence("r", 1, [5], replace(GREEDY, logit_bias=((3, bias),))))

    @pytest.mark.parametrize("penalty", [math.nan, math.inf, 5000.0, -5000.0])
    def test_a_length_penalty_must_keep_scores_finite(self, penalty: float) -> None:
        params = ResolvedSampling(max_tokens=8, beam_search=BeamParams(2, penalty))
        with pytest.raises(ValueError, match=r"length_penalty is .*; allowed: -10 to 10"):
            fake_engine().add(Sequence("r", 1, [5], params))

    def test_a_prompt_has_no_more_log_probabilities_told_than_a_message_holds(self) -> None:
        engine, most = fake_engine(2048, max_model_len=8192), MAX_PROMPT_LOGPROBS // (VOCAB_SIZE + 1)
        params = replace(GREEDY, prompt_logprobs=2**31)
        engine.check(Sequence("r", 1, prompt(most), params))
        with pytest.raises(
            ValueError, match=f"log-probabilities of a prompt; allowed: {MAX_PROMPT_LOGPROBS}"
        ):
            engine.check(Sequence("r", 1, prompt(most + 1), params))

    def test_numbers_at_their_bounds_are_taken_as_the_wire_rounds_them(self) -> None:
        engine = fake_engine()
        for params in (
            ResolvedSampling(2, temperature=2.0, top_p=1.0, min_p=1.0, repetition_penalty=0.01),
            ResolvedSampling(2, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=100.0),
            ResolvedSampling(2, top_k=2**31 - 1, logit_bias=((3, -100.0), (4, 100.0)), logprobs=20),
            ResolvedSampling(2, beam_search=BeamParams(2, -10.0)),
        ):
            engine.check(Sequence("r", 1, [5], ResolvedSampling.from_proto(params.to_proto())))


class TestHolding:
    def prefilled(self, engine: Engine) -> Sequence:
        seq = Sequence("r", 1, prompt(20), GREEDY, hold_after_prefill=True)
        run(engine, seq)
        return seq

    def test_stops_at_the_first_token_and_keeps_the_blocks(self) -> None:
        engine = fake_engine()
        seq = self.prefilled(engine)
        assert (seq.status, seq.num_computed) == (SequenceStatus.HELD, 20)
        assert seq.output_ids == run_alone(prompt(20), GREEDY)[:1]
        assert engine.step() == []
        assert (engine.stats().blocks.held, engine.stats().held) == (5, 1)

    @pytest.mark.parametrize("end", [lambda e, s: e.release(s), lambda e, s: e.cancel("r", 1)])
    def test_ends_by_release_or_cancel_once(self, end: Callable[[Engine, Sequence], bool]) -> None:
        engine = fake_engine()
        seq = self.prefilled(engine)
        assert end(engine, seq)
        assert not end(engine, seq)
        assert not engine.cancel("r", 1)
        assert not engine.release(seq)
        assert (seq.status, engine.stats().blocks.held) == (SequenceStatus.FINISHED, 0)

    def test_does_not_happen_when_the_first_token_is_the_last(self) -> None:
        engine = fake_engine()
        seq = Sequence(
            "r", 1, prompt(20), ResolvedSampling(max_tokens=1, temperature=0.0), hold_after_prefill=True
        )
        run(engine, seq)
        assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, FinishReason.LENGTH)

    def test_a_handoff_continues_the_same_stream(self) -> None:
        prefill, decode = fake_engine(), fake_engine()
        given = self.prefilled(prefill)
        with decode.lock:
            assert decode.pool.allocate(3) is not None  # other blocks than prefill's
            blocks = decode.pool.allocate(5)
        assert blocks is not None
        runner_of(decode).pool[blocks] = runner_of(prefill).pool[torch.tensor(given.block_ids)]
        taken = Sequence("r", 1, prompt(20), GREEDY, list(given.output_ids))
        taken.bind(blocks)
        decode.admit_computed(taken)
        while decode.has_work:
            decode.step()
        assert taken.output_ids == run_alone(prompt(20), GREEDY)
        local = Sequence("s", 1, prompt(20), GREEDY)
        assert run(decode, local) == [taken.output_ids]
        assert local.num_cached == 16

    def test_reservations_are_given_back(self) -> None:
        engine = fake_engine(num_blocks=4)
        assert engine.reserve(16)
        assert not engine.reserve(1)
        assert engine.stats().blocks_reserved == 4
        engine.unreserve(16)
        with pytest.raises(ValueError, match="1 pages, with 0 reserved"):
            engine.unreserve(1)


class TestCancelling:
    def test_is_idempotent_in_every_state(self) -> None:
        engine = fake_engine(max_num_seqs=1, prefill_chunk=8)
        for name in "ab":
            engine.add(Sequence(name, 1, prompt(20), GREEDY))
        engine.step()
        for name in "ab":  # running in the midst of its prompt, and waiting
            assert engine.cancel(name, 1)
            assert not engine.cancel(name, 1)
        assert not engine.cancel("unknown", 1)
        if engine.computing:  # blocks that a step under way may write to are not free
            assert engine.step() == []
        load = engine.stats()
        assert (load.blocks.held, load.running, load.waiting, load.waiting_prefill_tokens) == (0, 0, 0, 0)
        assert not engine.has_work

    def test_an_older_attempt_does_not_touch_a_newer_one(self) -> None:
        engine = fake_engine()
        engine.add(Sequence("r", 2, prompt(4), GREEDY))
        assert not engine.cancel("r", 1)
        assert engine.has_work
        assert engine.cancel("r", 3)

    def test_a_newer_attempt_takes_the_place_of_an_older_one(self) -> None:
        engine = fake_engine()
        old, new = (Sequence("r", attempt, prompt(4), GREEDY) for attempt in (1, 2))
        engine.add(old)
        engine.step()
        engine.add(new)
        assert old.finish_reason is FinishReason.CANCELLED
        with pytest.raises(ValueError, match="attempt 1 came while attempt 2 is here"):
            engine.add(Sequence("r", 1, prompt(4), GREEDY))
        with pytest.raises(ValueError, match="attempt 2 came while attempt 2 is here"):
            engine.add(Sequence("r", 2, prompt(4), GREEDY))
        while engine.has_work:
            engine.step()
        assert new.num_outputs == 12

    @pytest.mark.parametrize("by", ["cancel", "newer attempt"])
    def test_during_a_pass_gives_no_block_away_before_it_is_over(self, by: str) -> None:
        model = HookedModel()
        engine = fake_engine(num_blocks=8, model=model, prefix_caching=False)
        victim = Sequence("victim", 1, prompt(10), DRAWN)
        other = Sequence("other", 1, prompt(9), DRAWN)
        engine.add(victim)
        engine.add(other)
        engine.step()
        stolen: list[int] = []

        def meanwhile() -> None:
            if by == "cancel":
                assert elsewhere(lambda: engine.cancel("victim", 1))
                assert not elsewhere(lambda: engine.cancel("victim", 1))
            else:
                elsewhere(lambda: engine.add(Sequence("victim", 2, prompt(3), DRAWN)))
            with engine.lock:
                in_use = {*victim.block_ids, *other.block_ids}
                blocks = engine.pool.allocate(engine.pool.num_allocatable)
            assert blocks is not None
            stolen.extend(blocks)
            assert in_use.isdisjoint(blocks)
            runner_of(engine).pool[blocks] = -5.0

        model.hook = meanwhile
        outputs = engine.step()
        assert [out.seq for out in outputs] == [other]
        assert (victim.status, victim.finish_reason) == (SequenceStatus.FINISHED, FinishReason.CANCELLED)
        assert victim.num_outputs == 1
        engine.pool.free(stolen)
        while engine.has_work:
            engine.step()
        assert other.output_ids == run_alone(prompt(9), DRAWN)
        assert engine.stats().blocks.held == 0

    @pytest.mark.parametrize("length", range(4, 8))
    def test_at_the_end_of_a_block_hurts_nobody(self, length: int) -> None:
        """Steps may be under way that fill the block, the last of them with a token nobody hears of."""
        model = HookedModel()
        engine = fake_engine(model=model)
        other = Sequence("other", 1, prompt(9), GREEDY)
        engine.add(Sequence("victim", 1, prompt(length, salt=1), GREEDY))
        engine.add(other)
        engine.step()
        model.hook = lambda: engine.cancel("victim", 1)
        assert run(engine) == []
        assert other.output_ids == run_alone(prompt(9), GREEDY)
        assert engine.stats().blocks.held == 0

    def test_the_lock_is_free_during_a_pass(self) -> None:
        model = HookedModel()
        engine = fake_engine(model=model)
        engine.add(Sequence("r", 1, prompt(10), GREEDY))
        loads: list[int] = []
        model.hook = lambda: loads.append(elsewhere(engine.stats).running)
        engine.step()
        assert loads == [1]


class TestFailure:
    def test_a_failed_pass_can_be_repeated(self) -> None:
        model = HookedModel()
        engine = fake_engine(model=model)
        seqs = [Sequence(name, 1, prompt(18, salt=i), DRAWN) for i, name in enumerate("ab")]
        for seq in seqs:
            engine.add(seq)
        engine.step()

        def fail() -> None:
            assert engine.cancel("b", 1)
            raise RuntimeError("out of memory")

        for _ in range(3):
            model.hook = fail if seqs[1].status is SequenceStatus.RUNNING else None
            if model.hook is None:
                break
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
        assert seqs[1].finish_reason is FinishReason.CANCELLED
        while engine.has_work:
            engine.step()
        assert seqs[0].output_ids == run_alone(prompt(18), DRAWN)
        assert engine.stats().blocks.held == 0


class TestPreparation:
    def test_lays_out_tokens_slots_and_tables(self) -> None:
        engine = fake_engine(prefill_chunk=6, ahead="off")
        short, long = Sequence("a", 1, prompt(3), GREEDY), Sequence("b", 1, prompt(9, salt=1), GREEDY)
        engine.add(short)
        engine.step()
        engine.add(long)
        engine.step()
        inputs = runner_of(engine).prepare(engine.scheduler.schedule())
        ids, blocks = list(long.token_ids), list(long.block_ids)
        step = StepTensors.of(inputs.layout, inputs.buffer)
        batch = step.batch
        assert step.token_ids.tolist() == [short.token_ids[4], *ids[6:9]]
        assert batch.positions.tolist() == [4, 6, 7, 8]
        assert batch.slot_blocks.tolist() == [short.block_ids[1], blocks[1], blocks[1], blocks[2]]
        assert batch.slot_offsets.tolist() == [0, 2, 3, 0]
        assert (batch.num_decode, batch.decode_contexts.tolist()) == (1, [5])
        assert batch.decode_tables.tolist() == [list(short.block_ids)]
        [chunk] = batch.chunks
        assert (chunk.start, chunk.length, chunk.context, chunk.table.tolist()) == (1, 3, 9, blocks)
        assert inputs.due == (short, long)
        assert step.rows is None, "the model yields no others"
        assert batch.wanted is not None
        assert batch.wanted.rows.tolist() == [0, 3]
        padded = [*short.block_ids, *[0] * (len(blocks) - len(short.block_ids))]
        assert batch.wanted.tables.tolist() == [padded, blocks]

    def test_wants_every_row_of_a_prompt_whose_tokens_are_told(self) -> None:
        engine = fake_engine()
        scored = Sequence("a", 1, prompt(9), replace(GREEDY, prompt_logprobs=0))
        engine.add(scored)
        inputs = runner_of(engine).prepare(engine.scheduler.schedule())
        step = StepTensors.of(inputs.layout, inputs.buffer)
        assert step.batch.wanted is None
        assert step.rows is not None
        assert step.rows.tolist() == [8]


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("block_size", 0, "block_size is 0; allowed: a whole number of at least 1"),
            ("num_blocks", -1, "num_blocks is -1; allowed"),
            ("prefill_chunk", 1.5, "prefill_chunk is 1.5; allowed"),
            ("dtype", "int8", "dtype is 'int8'; allowed: auto, float32"),
            ("load_format", "pickle", "load_format is 'pickle'; allowed: auto, dummy"),
            ("device_memory_fraction", 0, "device_memory_fraction is 0; allowed: above 0"),
            (
                "max_num_batched_tokens",
                63,
                r"max_num_batched_tokens is 63; allowed: at least max_num_seqs \(64\)",
            ),
        ],
    )
    def test_errors_name_field_value_and_what_is_allowed(
        self, field: str, value: float | str, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            EngineConfig(Path("model"), **{field: value})  # type: ignore[arg-type]

    def test_the_context_cannot_exceed_the_models(self) -> None:
        with pytest.raises(ValueError, match="max_model_len is 4097; allowed: at most 4096"):
            EngineConfig(Path("model"), max_model_len=4097).limits(4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small Llama on disk; the tests set torch's threads, for the whole process."""
    threads = torch.get_num_threads()
    yield TINY_MODELS["llama"](tmp_path_factory.mktemp("models") / "llama")
    torch.set_num_threads(threads)


class TestRealModel:
    @pytest.mark.parametrize("chunk", [7, 512])
    def test_agrees_with_transformers(self, model: Path, chunk: int) -> None:
        config = EngineConfig(model, dtype="float32", num_blocks=13, prefill_chunk=chunk, num_threads=1)
        engine = Engine.from_config(config)
        prompts = [[(i * 29 + salt * 3) % 250 for i in range(20)] for salt in range(4)]
        params = ResolvedSampling(max_tokens=60, temperature=0.0, ignore_eos=True)
        outputs = run(engine, *(Sequence(str(i), 1, p, params) for i, p in enumerate(prompts)))
        assert engine.stats().scheduler.preemptions > 0
        for ids, answer in zip(prompts, outputs, strict=True):
            expected, margin = oracle_greedy(model, ids, 60)
            assert answer == expected or margin < 1e-3

    def test_the_pool_is_as_large_as_the_bytes_allow(self, model: Path) -> None:
        config = EngineConfig(model, kv_cache_bytes=1 << 20, num_threads=1)
        engine = Engine.from_config(config)
        block = runner_of(engine).pool[0].nbytes
        assert engine.pool.num_blocks == (1 << 20) // block
        with pytest.raises(ValueError, match=f"1 bytes are left for the KV cache; one block takes {block}"):
            Engine.from_config(EngineConfig(model, kv_cache_bytes=1, num_threads=1))


def test_blocks_are_stored_as_int64() -> None:
    # The runner reads these through the buffer protocol.
    seq = Sequence("r", 1, [1, 2], GREEDY)
    assert (seq.token_ids.itemsize, seq.block_ids.itemsize) == (8, 8)
    assert isinstance(seq.block_ids, array)


class TestAsyncScheduling:
    """Whether steps are launched ahead, as the engine's settings have it."""

    def test_is_on_where_there_is_a_device_alone(self) -> None:
        cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
        config = EngineConfig(Path("model"))
        assert [launches_ahead(config, device) for device in (cpu, cuda)] == [False, True]
        assert [launches_ahead(replace(config, async_scheduling="on"), device) for device in (cpu, cuda)] == [
            True,
            True,
        ]
        assert not launches_ahead(replace(config, async_scheduling="off"), cuda)
        assert not launches_ahead(replace(config, tensor_parallel_size=2), cuda)
        assert not launches_ahead(replace(config, speculative_method="ngram"), cuda)

    @pytest.mark.parametrize("change", [{"pipeline_parallel_size": 2}, {"speculative_method": "ngram"}])
    def test_is_refused_where_it_cannot_be(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"async_scheduling is 'on'; allowed with .*: auto, off"):
            EngineConfig(Path("model"), async_scheduling="on", **change)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_beside_scales_by_block_are_refused(method: Any) -> None:
    """A draft that is not accepted would have widened the scales of its block."""
    with pytest.raises(
        ValueError, match=rf"'fp8-dynamic'; allowed with speculative_method '{method}': auto, fp8"
    ):
        EngineConfig(Path("model"), kv_cache_dtype="fp8-dynamic", speculative_method=method)
    EngineConfig(Path("model"), kv_cache_dtype="fp8", speculative_method="ngram")
