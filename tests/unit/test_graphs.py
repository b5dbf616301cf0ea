"""Decode steps that are replayed, with all but the recording itself as on a device: their padding, their
buffers, and that they yield what a plain step does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine import startup
from baton.engine.config import EngineConfig
from baton.engine.defaults import LARGEST_GRAPH
from baton.engine.engine import Engine
from baton.engine.graphs import CudaRecord, DecodeBuffers, GraphedModel, GraphSize, graph_sizes
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.startup import recorded_sizes, replays
from baton.engine.step import DraftRows, StepTensors
from baton.engine.step_inputs import StepBuilder
from baton.models.base import CausalLM
from baton.models.loader import kv_block_bytes, load_model
from baton.speculation.draft_model import DraftModelDrafter, Forward
from baton_kernels.attention import new_pool
from baton_kernels.paged import Chunk, PagedBatch, WantedRows
from tests.support.deep import all_deep_but
from tests.support.drafters import HostileDrafter, ScriptedDrafter
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fake_cuda.streams import Order
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine, run, run_alone
from tests.support.paged_steps import Case, lay_out
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS

CPU = torch.device("cpu")
HIDDEN = 8


class TestSizes:
    def test_pad_by_seven_rows_at_most_and_fifteen_in_large_steps(self) -> None:
        assert [size.rows for size in graph_sizes(256)[:7]] == [1, 2, 4, 8, 16, 24, 32]
        assert graph_sizes(512)[-1] == graph_sizes(1000)[-1] == GraphSize(512)
        for most in range(1, 513):
            sizes = [size.rows for size in graph_sizes(most)]
            assert most <= sizes[-1] < most + (8 if most <= 256 else 16)
            assert list(sizes) == sorted(set(sizes))
            assert len(sizes) == 1 or sizes[-2] < most
        assert len(graph_sizes(512)) == 51

    def test_verifications_are_of_the_same_sequences_as_far_as_rows_go(self) -> None:
        assert graph_sizes(4, 3) == tuple(
            GraphSize(*size) for size in [(1, 1), (2, 1), (1, 3), (4, 1), (2, 3), (4, 3)]
        )
        for most, queries in ((16, 5), (256, 2), (512, 5), (512, 17)):
            sizes = graph_sizes(most, queries)
            assert [size.rows for size in sizes] == sorted(size.rows for size in sizes)
            assert [size for size in sizes if size.queries == 1] == list(graph_sizes(most))
            verified = [size for size in sizes if size.queries == queries]
            assert verified[-1].rows <= LARGEST_GRAPH
            counts = [size.sequences for size in graph_sizes(most)]
            assert [size.sequences for size in verified] == counts[: len(verified)]
            assert len(verified) == len(counts) or counts[len(verified)] * queries > LARGEST_GRAPH

    def test_are_recorded_only_on_cuda(self, tmp_path: Path) -> None:
        config = EngineConfig(tmp_path)
        assert replays(config, torch.device("cuda"))
        assert not replays(config, CPU)
        assert not replays(replace(config, enforce_eager=True), torch.device("cuda"))


@dataclass
class Replayed:
    run: Callable[[], None]
    record: Recorder

    def replay(self) -> None:
        self.record.replays += 1
        self.run()


@dataclass
class Recorder:
    """Records by remembering the function, as a graph remembers its kernels."""

    recorded: int = 0
    replays: int = 0

    def __call__(self, run: Callable[[], None]) -> Replayed:
        self.recorded += 1
        return Replayed(run, self)


def records_nothing(run: Callable[[], None]) -> Replayed:
    """Runs without recording, as kernels do that go to another stream than the recorded one."""
    run()
    return Replayed(lambda: None, Recorder())


class TestRecording:
    def test_one_that_does_nothing_is_refused(self) -> None:
        pool = new_pool(4, 1, 2, 16, 4, dtype=torch.float32, device=CPU)
        with pytest.raises(RuntimeError, match="a recorded step of 8 rows does nothing when it is replayed"):
            GraphedModel(Telling(), pool, graph_sizes(8), 8, records_nothing)

    def test_is_of_the_named_device_and_of_this_thread_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever device was current when torch made its own stream for recordings."""
        asked: list[dict[str, object]] = []

        @contextmanager
        def graph(of: object, **options: object) -> Iterator[None]:
            asked.append(options)
            yield

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
        record = CudaRecord(torch.device("cuda", 1))
        ran: list[int] = []
        for number in range(2):
            record(partial(ran.append, number))
        expected = {
            "pool": "memory",
            "stream": ("stream", torch.device("cuda", 1)),
            "capture_error_mode": "thread_local",
        }
        assert asked == [expected, expected]
        assert ran == [0, 1]


@dataclass
class Telling:
    """A model whose hidden states are what it was given, and which writes what it sees into the pool."""

    sizes: list[int] = field(default_factory=list)

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        self.sizes.append(len(token_ids))
        pool[batch.slot_blocks, :, :, :, batch.slot_offsets] = token_ids.float()[:, None, None, None, None]
        columns = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.decode_contexts)
        rows = zip(batch.row_tables, batch.decode_contexts.tolist(), strict=True)
        seen = [int(table[: -(-context // 16)].sum()) for table, context in rows]
        return torch.stack([*(column.float() for column in columns), torch.tensor(seen).float()], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def decode_step(contexts: tuple[int, ...], queries: int = 1) -> tuple[Tensor, PagedBatch, int]:
    """Token ids, a step, and the blocks it needs. Padding among the rows writes to the block behind these."""
    pool, batch = lay_out(Case(2, 1, 16, 16, None, contexts, (), queries=queries))
    blocks = batch.slot_blocks.masked_fill(batch.decode_contexts == 0, pool.shape[0])
    return torch.arange(7, 7 + batch.num_decode), replace(batch, slot_blocks=blocks), pool.shape[0]


def graphed(
    model: Telling, blocks: int, most: int = 10, width: int = 8, queries: int = 1
) -> tuple[GraphedModel, Tensor, Recorder]:
    pool = new_pool(blocks + 1, 1, 2, 16, 4, dtype=torch.float32, device=CPU)
    record = Recorder()
    return GraphedModel(model, pool, graph_sizes(most, queries), width, record), pool, record


class TestSteps:
    def test_every_size_is_recorded_the_largest_first(self) -> None:
        model = Telling()
        _, _, record = graphed(model, 3)
        assert list(dict.fromkeys(model.sizes)) == [16, 8, 4, 2, 1]
        assert record.recorded == record.replays == 5, "each is tried once"
        _, _, record = graphed(model := Telling(), 3, most=4, queries=3)
        assert list(dict.fromkeys(model.sizes)) == [12, 6, 4, 3, 2, 1]
        assert record.recorded == record.replays == 6

    @pytest.mark.parametrize("queries", [1, 3])
    @pytest.mark.parametrize("sequences", [1, 2, 3, 5, 9, 10])
    def test_are_padded_and_yield_the_same(self, sequences: int, queries: int) -> None:
        token_ids, batch, blocks = decode_step(tuple(range(3, 3 + 11 * sequences, 11)), queries)
        model = Telling()
        over, pool, record = graphed(model, blocks, queries=queries)
        plain = pool.clone()
        expected = model.forward(token_ids, batch, plain)
        tried = record.replays
        with torch.inference_mode():
            hidden = over.forward(token_ids, batch, pool)
        assert torch.equal(hidden, expected)
        assert record.replays == tried + 1
        assert model.sizes[-1] == graph_sizes(sequences)[-1].rows * queries
        # What padding wrote went to the scratch block, and nowhere else.
        assert torch.equal(pool[:-1], plain[:-1])

    def test_nothing_of_a_step_is_left_in_the_next(self) -> None:
        model = Telling()
        over, pool, _ = graphed(model, 200, queries=3)
        first: Tensor | None = None
        steps = ((100, 120, 90, 5, 6, 7), (1, 2), (128,) * 10, (3,), (17, 30, 2), (40, 50), (9,))
        with torch.inference_mode():
            for contexts, queries in zip(steps, (1, 1, 3, 1, 3, 1, 3), strict=True):
                token_ids, batch, _ = decode_step(contexts, queries)
                nobody = pool.shape[0] - 1
                own = batch.slot_blocks.masked_fill(batch.decode_contexts == 0, nobody)
                batch = replace(batch, slot_blocks=own)
                expected = model.forward(token_ids, batch, pool.clone())
                hidden = over.forward(token_ids, batch, pool)
                assert torch.equal(hidden, expected)
                first = hidden if first is None else first
        assert first is not None
        assert first[:, 4].tolist() == [100, 120, 90, 5, 6, 7]

    def test_only_the_wanted_rows_come_back(self) -> None:
        token_ids, batch, blocks = decode_step((5, 40, 3))
        model = Telling()
        over, pool, _ = graphed(model, blocks)
        wanted = WantedRows(torch.tensor([2, 0]), batch.decode_tables[[2, 0]])
        with torch.inference_mode():
            expected = model.forward(token_ids, batch, pool)[[2, 0]]
            assert torch.equal(over.forward(token_ids, replace(batch, wanted=wanted), pool), expected)

    def test_of_other_numbers_of_drafts_are_not_replayed(self) -> None:
        over, _, _ = graphed(Telling(), 200, most=8, queries=3)
        for queries, size in ((1, GraphSize(8)), (2, None), (3, GraphSize(8, 3)), (4, None)):
            assert over.size_for(decode_step((9,) * 5, queries)[1]) == size
        assert over.size_for(decode_step((9,) * 9, 3)[1]) is None
        large, _, _ = graphed(Telling(), 200, most=64, queries=17)
        assert large.size_for(decode_step((20,) * 24, 17)[1]) == GraphSize(24, 17)
        assert large.size_for(decode_step((20,) * 31, 17)[1]) is None, "more than 512 rows"
        assert large.draft_rows == DraftRows(17, 24, 200)
        assert graphed(Telling(), 3)[0].draft_rows is None

    def test_others_are_computed_as_ever(self) -> None:
        token_ids, batch, blocks = decode_step((5, 40))
        over, _, _ = graphed(Telling(), blocks, most=8, width=4)
        assert over.size_for(batch) == GraphSize(2)
        chunk = Chunk(2, 3, 3, torch.tensor([0]))
        for other in (
            replace(batch, chunks=(chunk,)),
            replace(batch, num_decode=0, decode_tables=batch.decode_tables[:0]),
            replace(batch, num_decode=9, decode_tables=torch.zeros(9, 3, dtype=torch.int64)),
            replace(batch, lengths=token_ids),
            replace(batch, decode_tables=torch.zeros(2, 5, dtype=torch.int64)),
        ):
            assert over.size_for(other) is None

    def test_padded_rows_have_no_context_and_a_block_of_nobody(self) -> None:
        token_ids, batch, _ = decode_step((5, 40, 3))
        buffers = DecodeBuffers.allocate(graph_sizes(8), 6, 99, CPU)
        buffers.fill(token_ids, batch, GraphSize(4))
        _, step = buffers.step(GraphSize(4))
        assert step.slot_blocks.tolist() == [*batch.slot_blocks.tolist(), 99]
        assert step.decode_contexts.tolist() == [5, 40, 3, 0]
        assert step.num_decode == 4


def outputs(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_an_engine_yields_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Requests that come and go, so that steps of many sizes follow each other, some preempted."""
    path = TINY_MODELS[name](tmp_path / name)

    def requests() -> list[Sequence]:
        params = ResolvedSampling(max_tokens=30, temperature=0.8, ignore_eos=True)
        return [
            Sequence(
                f"r{i}",
                0,
                array("q", [(i * 29 + j * 7) % 250 for j in range(5 + 3 * i)]),
                replace(params, seed=i, max_tokens=20 + 6 * i),
            )
            for i in range(7)
        ]

    def engine() -> Engine:
        return Engine.from_config(EngineConfig(path, dtype="float32", num_blocks=10))

    plain = outputs(engine(), requests())
    over = engine()
    runner = runner_of(over)
    whole = torch.zeros((11, *runner.pool.shape[1:]))
    runner.pool = whole[:10]
    record = Recorder()
    runner.model = GraphedModel(runner.model, whole, graph_sizes(6), 10, record)
    assert outputs(over, requests()) == plain
    assert over.stats().scheduler.preemptions > 0
    assert record.replays > 20
    assert whole[:10].isfinite().all()  # what padding computes is in the last block alone


@dataclass(frozen=True)
class Seen:
    """A step that a model was given."""

    sequences: int
    queries: int
    chunks: int
    replayed: bool


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The steps that models with recordings are given from here on."""
    steps: list[Seen] = []
    forward = GraphedModel.forward

    def seeing(self: GraphedModel, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        size = self.size_for(batch)
        steps.append(
            Seen(len(batch.decode_tables), batch.decode_queries, len(batch.chunks), size is not None)
        )
        return forward(self, token_ids, batch, pool)

    monkeypatch.setattr(GraphedModel, "forward", seeing)
    return steps


def prompt(number: int) -> list[int]:
    return [(i * i * 31 + i * 17 + number * 7 + 5) % VOCAB_SIZE for i in range(5 + 6 * number)]


class TestVerifications:
    """Steps with drafts, on a fake device: the model's tokens hang on every K and V in sight."""

    PARAMS = ResolvedSampling(max_tokens=30, temperature=0.0, ignore_eos=True)

    @pytest.mark.parametrize("order", all_deep_but(1, get_args(Order)))
    @pytest.mark.parametrize(("fault", "num_drafts"), all_deep_but(1, [(0, 4), (2, 4), (3, 1), (7, 16)]))
    def test_they_yield_the_same_tokens(
        self, order: Order, fault: int, num_drafts: int, seen: list[Seen]
    ) -> None:
        drafter, prompts = ScriptedDrafter(fault), [prompt(number) for number in range(4)]
        params = [replace(self.PARAMS, max_tokens=13 + 7 * number) for number in range(4)]
        expected = [run_alone(*request) for request in zip(prompts, params, strict=True)]
        for ids, outputs in zip(prompts, expected, strict=True):
            drafter.expect(ids, outputs)
        requests = [Sequence(f"{i}", 1, *each) for i, each in enumerate(zip(prompts, params, strict=True))]
        with FakeCuda(order=order) as cuda:
            engine = fake_engine(
                26,
                max_num_batched_tokens=100,
                drafter=drafter,
                num_drafts=num_drafts,
                device="cuda",
                graphs=True,
            )
            tried = cuda.timeline.issued["replay "]
            assert run(engine, *requests) == expected
            replays = cuda.timeline.issued["replay "] - tried
        assert engine.stats().speculation.accepted_tokens > 0
        assert replays == sum(step.replayed for step in seen)
        assert all(step.replayed == (step.chunks == 0) for step in seen)
        verified = [step.sequences for step in seen if step.replayed and step.queries == 1 + num_drafts]
        assert len(verified) > 3
        assert max(verified) > 1, "several sequences at once"
        assert {step.queries for step in seen} <= {1, 1 + num_drafts}

    @pytest.mark.parametrize("seed", all_deep_but(1, range(3)))
    def test_hidden_states_are_of_the_tokens_they_are_said_to_be_of(
        self, seed: int, seen: list[Seen]
    ) -> None:
        """The drafter drafts anything, of any length, and compares the hidden states that it gets."""
        drafter = HostileDrafter(seed, VOCAB_SIZE, wants_hidden=True)
        prompts = [prompt(number) for number in range(4)]
        with FakeCuda():
            engine = fake_engine(max_num_batched_tokens=100, drafter=drafter, device="cuda", graphs=True)
            outputs = run(engine, *(Sequence(f"{i}", 1, ids, self.PARAMS) for i, ids in enumerate(prompts)))
        assert outputs == [run_alone(ids, self.PARAMS) for ids in prompts]
        assert sum(step.replayed and step.queries > 1 for step in seen) > 3

    def test_beside_a_prompt_they_are_chunks(self, seen: list[Seen]) -> None:
        drafter = ScriptedDrafter()
        drafter.expect(prompt(2), run_alone(prompt(2), self.PARAMS))
        with FakeCuda():
            engine = fake_engine(max_num_batched_tokens=20, drafter=drafter, device="cuda", graphs=True)
            first, second = Sequence("0", 1, prompt(2), self.PARAMS), Sequence("1", 1, prompt(6), self.PARAMS)
            engine.add(first)
            while first.num_outputs < 8:
                engine.step()
            seen.clear()
            assert run(engine, second)
        assert Seen(0, 1, 2, replayed=False) in seen
        assert first.output_ids == run_alone(prompt(2), self.PARAMS)
        assert second.output_ids == run_alone(prompt(6), self.PARAMS)

    def test_padding_writes_to_a_block_of_nobody(self) -> None:
        """One sequence has two drafts, one has none, one has as many as are allowed."""
        builder = StepBuilder(4, CPU, with_lengths=False)
        builder.draft_rows = DraftRows(4, 8, scratch=99)
        sequences = [Sequence(f"{i}", 0, [10 * i + at for at in range(6 + i)], self.PARAMS) for i in range(3)]
        for i, sequence in enumerate(sequences):
            sequence.block_ids = array("q", [3 * i, 3 * i + 1, 3 * i + 2])
        one, none, all_of_them = sequences
        drafts: dict[Sequence, list[int]] = {one: [70, 71], all_of_them: [72, 73, 74]}
        order = (none, one, all_of_them)
        items = (
            Scheduled(seq, 1 + len(drafts.get(seq, ())), seq.num_tokens - 1, chooses=True) for seq in order
        )
        inputs = builder.build(ScheduledBatch(tuple(items), 1, drafts=drafts), {}, every_row=True)
        step = StepTensors.of(inputs.layout, inputs.buffer)
        batch = step.batch
        assert step.token_ids.view(3, 4).tolist() == [[16, 0, 0, 0], [5, 70, 71, 0], [27, 72, 73, 74]]
        assert batch.positions.view(3, 4).tolist() == [[6, 0, 0, 0], [5, 6, 7, 0], [7, 8, 9, 10]]
        assert batch.decode_contexts.view(3, 4).tolist() == [[7, 0, 0, 0], [6, 7, 8, 0], [8, 9, 10, 11]]
        assert batch.slot_blocks.view(3, 4).tolist() == [[4, 99, 99, 99], [1, 1, 1, 99], [7, 8, 8, 8]]
        assert batch.slot_offsets.view(3, 4).tolist() == [[2, 0, 0, 0], [1, 2, 3, 0], [3, 0, 1, 2]]
        assert batch.decode_tables.tolist() == [[3, 4, 5], [0, 1, 2], [6, 7, 8]]
        assert (batch.decode_queries, batch.num_decode, batch.chunks, batch.wanted) == (4, 12, (), None)
        assert step.rows is not None
        assert step.rows.tolist() == [0, 4, 5, 6, 8, 9, 10, 11]
        assert inputs.due == (none,)
        assert [drafted.sequence for drafted in inputs.drafted] == [one, all_of_them]

    def test_of_large_steps_only_those_with_many_drafts_are_padded(self) -> None:
        rows = DraftRows(5, 100, scratch=9)
        assert rows.suits(1, 2)
        assert rows.suits(25, 26), "125 rows cost what 26 do"
        assert not rows.suits(26, 27)
        assert rows.suits(80, 200)
        assert not rows.suits(101, 505), "not recorded"

    def test_are_recorded_as_far_as_a_tile_has_rows_for_them(self, tmp_path: Path) -> None:
        model = load_model(TINY_MODELS["llama"](tmp_path / "llama"), "float32")
        group = model.config.num_heads // model.config.num_kv_heads
        config = EngineConfig(tmp_path, speculative_method="ngram", num_speculative_tokens=3)
        assert recorded_sizes(config, model) == graph_sizes(config.sizes.max_num_seqs, 4)
        most = 32 // group
        for drafts, queries in ((most - 1, most), (most, 1)):
            config = replace(config, num_speculative_tokens=drafts)
            assert recorded_sizes(config, model) == graph_sizes(config.sizes.max_num_seqs, queries)
        plain = EngineConfig(tmp_path)
        assert recorded_sizes(plain, model) == graph_sizes(plain.sizes.max_num_seqs)


class TestDraftModels:
    @pytest.mark.parametrize("accepted", [0, 2, 4])
    def test_drafts_are_those_of_passes_that_are_not_replayed(self, accepted: int, tmp_path: Path) -> None:
        """Sequences with a prompt, with a few tokens and with one token to compute, some of them at once."""
        model = FakeModel(VOCAB_SIZE)  # its drafts hang on every K and V in sight
        model.config = load_model(TINY_MODELS["llama"](tmp_path / "llama")).config  # type: ignore[attr-defined]
        model.dtype = torch.float32  # type: ignore[attr-defined]
        record = Recorder()

        def replay(model: CausalLM, pool: Tensor) -> Forward:
            return GraphedModel(model, pool, graph_sizes(8), 20, record).forward

        plain = DraftModelDrafter(model, 40, 4, CPU, 64)  # type: ignore[arg-type]
        over = DraftModelDrafter(model, 40, 4, CPU, 64, replay)  # type: ignore[arg-type]
        assert over.num_free == plain.num_free == 40, "the block behind them is nobody's"
        params = ResolvedSampling(max_tokens=60)
        sequences = [Sequence(f"{i}", 0, prompt(i), params) for i in range(4)]
        tried = record.replays
        for step in range(1, 6):
            drafting = sequences[:step]
            drafts = over.draft(drafting, [4] * len(drafting))
            assert drafts == plain.draft(drafting, [4] * len(drafting))
            assert all(len(own) == 4 for own in drafts)
            for sequence, own in zip(drafting, drafts, strict=True):
                for token in (*own[:accepted], 7):
                    sequence.append(token)
        assert record.replays - tried == 5 * 4 - 4, "all but the first pass of a step with a new prompt"
        assert torch.equal(over._pool[:40], plain._pool), "padding has written to the block behind"

    @pytest.mark.deep
    @pytest.mark.parametrize("eager", all_deep_but(1, [False, True]))
    def test_a_model_drafts_for_itself_without_a_fault(
        self, eager: bool, tmp_path: Path, seen: list[Seen]
    ) -> None:
        """The cache of the draft model is right everywhere: else some greedy draft would be refused."""
        path = TINY_MODELS["llama"](tmp_path / "llama")
        params = ResolvedSampling(max_tokens=16, temperature=0.0, ignore_eos=True)

        def requests() -> list[Sequence]:
            return [Sequence(f"{i}", 1, prompt(i), params) for i in range(3)]

        config = EngineConfig(path, dtype="float32", num_blocks=16, max_num_seqs=4, enforce_eager=eager)
        drafting = replace(config, speculative_method="draft", speculative_model=str(path))
        expected = outputs(Engine.from_config(config), requests())
        with FakeCuda(memory_bytes=256 << 20) as cuda:
            engine = Engine.from_config(replace(drafting, device="cuda", max_graph_tokens=0))
            tried = cuda.timeline.issued["replay "]
            seen.clear()
            assert outputs(engine, requests()) == expected
            replays = cuda.timeline.issued["replay "] - tried
        stats = engine.stats().speculation
        assert stats.accepted_tokens == stats.drafted_tokens > 3 * 8
        assert replays == sum(step.replayed for step in seen)
        if eager:
            assert not seen
        else:
            assert all(step.replayed == (step.chunks == 0) for step in seen)
            verified = sum(step.queries == 5 for step in seen)
            assert verified >= 3
            assert sum(step.replayed and step.queries == 1 for step in seen) >= 3 * verified, (
                "of the draft model"
            )

    @pytest.mark.deep
    def test_their_recordings_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = TINY_MODELS["llama"](tmp_path / "llama")
        config = EngineConfig(
            path, dtype="float32", max_num_seqs=4, max_model_len=64, device_memory_fraction=0.4
        )
        config = replace(config, device="cuda", speculative_method="draft", speculative_model=str(path))
        config = replace(config, max_graph_tokens=0)
        model = load_model(path, "float32")
        block_bytes = 2 * kv_block_bytes(model.config, config.sizes.block_size, model.dtype)

        def fitting() -> int:
            with FakeCuda(memory_bytes=64 << 20):
                return Engine.from_config(config).pool.num_blocks

        measured = fitting()
        monkeypatch.setattr(startup, "_draft_recordings", lambda *given: 0)
        uncounted = fitting()
        monkeypatch.setattr(startup, "_draft_recordings", lambda *given: 10 << 20)
        fewer = fitting()
        assert measured < uncounted
        assert (uncounted - fewer) * block_bytes == pytest.approx(10 << 20, abs=block_bytes)
