"""Steps with prompts that are replayed in pieces, on a device whose work runs late: the tokens are those of a
CPU, and the host launches a piece and attention for each layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs import CudaRecord, Recording
from baton.engine.pieces import PiecewiseModel, TokenBuffers, piece_sizes
from baton.engine.sequence import Sequence
from baton.engine.startup import pieces_of
from baton_kernels.attention import AttentionPlan
from baton_kernels.paged import Chunk, PagedBatch
from tests.support.deep import all_deep_but
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fake_engine import run
from tests.support.runners import runner_of
from tests.support.tiny_models import ModelDir

CUDA = torch.device("cuda")
GREEDY = ResolvedSampling(max_tokens=6, temperature=0.0, ignore_eos=True)
LAYERS = 3
"""Layers of the tiny models."""


def prompt(number: int, length: int) -> list[int]:
    return [(i * i * 31 + i * 17 + number * 7 + 5) % 97 for i in range(length)]


def engine_of(path: Path, device: str, **options: object) -> Engine:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "prefill_chunk": 24, "max_graph_tokens": 32}
    config = EngineConfig(path, device=device, dtype="float32", num_blocks=24, block_size=16)
    return Engine.from_config(replace(config, **(sizes | options)))  # type: ignore[arg-type]


def asked(scored: bool = False) -> list[Sequence]:
    """Requests that come in the middle of others' answers, with prompts in chunks."""
    params = replace(GREEDY, prompt_logprobs=2 if scored else None)
    return [Sequence(f"r{i}", 0, prompt(i, 3 + 14 * i), params) for i in range(4)]


def answers(engine: Engine, *, scored: bool = False) -> list[list[int]]:
    first, *others = asked(scored)
    engine.add(first)
    for _ in range(3):
        engine.step()
    rest = run(engine, *others)
    return [list(first.output_ids), *rest]


class TestSizes:
    def test_are_few_and_near_each_other(self) -> None:
        assert piece_sizes(40) == (8, 16, 24, 32, 40)
        assert piece_sizes(33)[-1] == 40
        assert piece_sizes(4) == ()
        assert 45 < len(piece_sizes(512)) < 55

    def test_are_of_one_rank_on_cuda_as_far_as_steps_go(self, tmp_path: Path) -> None:
        config = EngineConfig(tmp_path, device="cuda")
        assert pieces_of(config, CUDA)[-1] == 512
        assert pieces_of(replace(config, max_num_seqs=8, max_num_batched_tokens=100), CUDA)[-1] == 104
        assert pieces_of(replace(config, max_graph_tokens=64), CUDA)[-1] == 64
        for none in ({"max_graph_tokens": 0}, {"enforce_eager": True}, {"tensor_parallel_size": 2}):
            assert pieces_of(replace(config, **none), CUDA) == ()
        assert pieces_of(config, torch.device("cpu")) == ()


class TestTokens:
    @pytest.mark.deep
    @pytest.mark.parametrize(
        ("family", "scored"), all_deep_but(1, [("llama", True), ("qwen3", False), ("mistral", True)])
    )
    def test_are_a_cpus(self, family: str, scored: bool, model_dir: ModelDir) -> None:
        path = model_dir(family)
        expected = answers(engine_of(path, "cpu"), scored=scored)
        with FakeCuda():
            engine = engine_of(path, "cuda")
            assert isinstance(runner_of(engine).model, PiecewiseModel)
            assert answers(engine, scored=scored) == expected


class TestReplay:
    @pytest.mark.deep
    def test_launches_a_piece_and_attention_for_each_layer(self, model_dir: ModelDir) -> None:
        """A step of more tokens than any recording is left to the model."""
        path = model_dir("llama")
        with FakeCuda() as device:
            engine = engine_of(path, "cuda", prefill_chunk=40)
            for length, replayed in ((20, LAYERS + 1), (32, LAYERS + 1), (33, 0)):
                engine.add(Sequence(f"r{length}", 0, prompt(length, length), replace(GREEDY, max_tokens=1)))
                before = device.timeline.issued["replay "]
                engine.step()
                assert device.timeline.issued["replay "] - before == replayed

    @pytest.mark.deep
    def test_ends_the_start_where_it_does_nothing(
        self, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels may go to another stream than the one that is recorded."""

        class Nothing:
            def replay(self) -> None: ...

        monkeypatch.setattr(CudaRecord, "step", lambda record: nullcontext())
        monkeypatch.setattr(CudaRecord, "begin", lambda record: None)
        monkeypatch.setattr(CudaRecord, "end", lambda record: Nothing())
        path = model_dir("llama")
        with FakeCuda(), pytest.raises(RuntimeError, match="a recorded step of 32 rows does nothing"):
            engine_of(path, "cuda")


@pytest.mark.deep
def test_nothing_is_recorded_for_angles_that_depend_on_the_length(model_dir: ModelDir) -> None:
    """No step with ``PagedBatch.lengths`` would be replayed."""
    path = model_dir("llama-dynamic")
    expected = answers(engine_of(path, "cpu"))
    with FakeCuda() as device:
        engine = engine_of(path, "cuda")
        assert answers(engine) == expected
        assert device.timeline.issued["replay "] == 0


class TestBuffers:
    def test_padded_rows_write_to_the_block_of_nobody(self) -> None:
        buffers = TokenBuffers(8, scratch=9, device=torch.device("cpu"))
        full = torch.arange(8)
        buffers.fill(full + 20, batch_of(full, full % 4), 8)
        three = torch.arange(3)
        buffers.fill(three + 50, batch_of(three + 5, three), 8)
        token_ids, batch = buffers.step(8, AttentionPlan.build)  # type: ignore[arg-type]
        assert token_ids.tolist() == [50, 51, 52, 0, 0, 0, 0, 0]
        assert batch.positions.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
        assert batch.slot_blocks.tolist() == [0, 1, 2, 9, 9, 9, 9, 9]
        assert batch.slot_offsets.tolist() == [0, 0, 0, 0, 0, 0, 0, 0]


def batch_of(positions: torch.Tensor, blocks: torch.Tensor) -> PagedBatch:
    count = len(positions)
    chunk = Chunk(0, count, count, blocks)
    none = positions[:0]
    return PagedBatch(positions, blocks, torch.zeros_like(blocks), 0, none[None], none, (chunk,))


class TestRecording:
    def test_a_failure_ends_what_was_begun(self) -> None:
        """The device can be recorded on again."""
        with FakeCuda():
            record = CudaRecord(torch.device("cuda", 0))
            kept = torch.zeros(4, device=CUDA)
            with pytest.raises(ValueError, match="in the middle"), record.step():
                record.begin()
                kept.add_(1)
                raise ValueError("in the middle")
            recorded = recorded_by(record, lambda: kept.add_(1))
            recorded.replay()
            recorded.replay()
            assert kept.tolist() == [2, 2, 2, 2]


def recorded_by(record: CudaRecord, run: Callable[[], object]) -> Recording:
    with record.step():
        record.begin()
        run()
        return record.end()
