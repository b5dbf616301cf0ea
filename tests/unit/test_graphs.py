"""Decode steps that are replayed, with all but the recording itself as on a device: their padding, their
buffers, and that they yield what a plain step does."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs import DecodeBuffers, GraphedModel, graph_sizes
from baton.engine.sequence import Sequence
from baton.engine.startup import replays
from baton.sampling_params import SamplingParams
from baton_kernels.attention import new_pool
from baton_kernels.paged import Chunk, PagedBatch
from tests.support.paged_steps import Case, lay_out
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS

CPU = torch.device("cpu")
HIDDEN = 8


class TestSizes:
    def test_pad_by_seven_rows_at_most(self) -> None:
        assert graph_sizes(256)[:7] == (1, 2, 4, 8, 16, 24, 32)
        assert graph_sizes(256)[-1] == graph_sizes(1000)[-1] == 256
        for most in range(1, 257):
            sizes = graph_sizes(most)
            assert most <= sizes[-1] < most + 8
            assert list(sizes) == sorted(set(sizes))
            assert len(sizes) == 1 or sizes[-2] < most

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


@dataclass
class Telling:
    """A model whose hidden states are what it was given, and which writes what it sees into the pool."""

    sizes: list[int] = field(default_factory=list)

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        self.sizes.append(len(token_ids))
        pool[batch.slot_blocks, :, :, :, batch.slot_offsets] = token_ids.float()[:, None, None, None, None]
        columns = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.decode_contexts)
        rows = zip(batch.decode_tables, batch.decode_contexts.tolist(), strict=True)
        seen = [int(table[: -(-context // 16)].sum()) for table, context in rows]
        return torch.stack([*(column.float() for column in columns), torch.tensor(seen).float()], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def decode_step(contexts: tuple[int, ...]) -> tuple[Tensor, PagedBatch, int]:
    """Token ids, a step, and the blocks it needs."""
    pool, batch = lay_out(Case(2, 1, 16, 16, None, contexts, ()))
    return torch.arange(7, 7 + len(contexts)), batch, pool.shape[0]


def graphed(
    model: Telling, blocks: int, most: int = 10, width: int = 8
) -> tuple[GraphedModel, Tensor, Recorder]:
    pool = new_pool(blocks + 1, 1, 2, 16, 4, dtype=torch.float32, device=CPU)
    record = Recorder()
    return GraphedModel(model, pool, graph_sizes(most), width, record), pool, record


class TestSteps:
    def test_every_size_is_recorded_the_largest_first(self) -> None:
        model = Telling()
        _, _, record = graphed(model, 3)
        assert model.sizes == [16, 8, 4, 2, 1]
        assert record.recorded == 5

    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 10])
    def test_are_padded_and_yield_the_same(self, rows: int) -> None:
        token_ids, batch, blocks = decode_step(tuple(range(1, 1 + 11 * rows, 11)))
        model = Telling()
        over, pool, record = graphed(model, blocks)
        plain = pool.clone()
        expected = model.forward(token_ids, batch, plain)
        with torch.inference_mode():
            hidden = over.forward(token_ids, batch, pool)
        assert torch.equal(hidden, expected)
        assert record.replays == 1
        assert model.sizes[-1] == graph_sizes(rows)[-1]
        # What padding wrote went to the scratch block, and nowhere else.
        assert torch.equal(pool[:-1], plain[:-1])

    def test_nothing_of_a_step_is_left_in_the_next(self) -> None:
        model = Telling()
        over, pool, _ = graphed(model, 200)
        first: Tensor | None = None
        with torch.inference_mode():
            for contexts in ((100, 120, 90, 5, 6, 7), (1, 2), (128,) * 10, (3,), (17, 30, 2)):
                token_ids, batch, _ = decode_step(contexts)
                expected = model.forward(token_ids, batch, pool.clone())
                hidden = over.forward(token_ids, batch, pool)
                assert torch.equal(hidden, expected)
                first = hidden if first is None else first
        assert first is not None
        assert first[:, 4].tolist() == [100, 120, 90, 5, 6, 7]

    def test_others_are_computed_as_ever(self) -> None:
        token_ids, batch, blocks = decode_step((5, 40))
        over, _, _ = graphed(Telling(), blocks, most=8, width=4)
        assert over.size_for(batch) == 2
        chunk = Chunk(2, 3, 3, torch.tensor([0]))
        for other in (
            replace(batch, chunks=(chunk,)),
            replace(batch, num_decode=0),
            replace(batch, num_decode=9),
            replace(batch, lengths=token_ids),
            replace(batch, decode_tables=torch.zeros(2, 5, dtype=torch.int64)),
        ):
            assert over.size_for(other) is None

    def test_padded_rows_have_no_context_and_a_block_of_nobody(self) -> None:
        token_ids, batch, _ = decode_step((5, 40, 3))
        buffers = DecodeBuffers.allocate(8, 6, 99, CPU)
        buffers.fill(token_ids, batch, 4)
        _, step = buffers.step(4)
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
        params = SamplingParams(max_tokens=30, temperature=0.8, ignore_eos=True)
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
    assert over.load().preemptions > 0
    assert record.replays > 20
    assert whole[:10].isfinite().all()  # what padding computes is in the last block alone
