"""The size of a pool that is measured: with it, the largest steps and the recordings fit in the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine import graphs, memory, pieces
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs import GraphSize, Recording, graph_sizes
from baton.engine.kv.block_pool import BlockPool
from baton.engine.memory import MeasuredRecord, blocks_that_fit, largest_steps
from baton.engine.pieces import piece_sizes
from baton.engine.rank_start import LoadedRank
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.models.base import CausalLM
from baton.models.loader import kv_layout, load_model
from baton.speculation.drafter import TokenSequence
from baton.speculation.speculator import Speculator
from tests.support.device_memory import DeviceMemory
from tests.support.tiny_models import save_llama

CPU = torch.device("cpu")
VOCAB = 8_000
"""So large that logits outweigh all else of a step, as they do where many sequences run."""
WEIGHTS = 1 << 20
TOTAL = 80 << 20
LONGEST = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedRank:
    model = load_model(path, "float32")
    return LoadedRank(model, CPU, 16, kv_layout(model.config, 16, torch.float32), torch.float32)


def config_of(path: Path, **settings: Any) -> EngineConfig:
    sizes = {"max_num_seqs": 48, "max_num_batched_tokens": 240, "prefill_chunk": 240}
    return EngineConfig(path, dtype="float32", max_model_len=LONGEST, **(sizes | settings))


def fitting(
    config: EngineConfig,
    loaded: LoadedRank,
    sizes: tuple[GraphSize, ...] = (),
    prompts: tuple[int, ...] = (),
) -> int:
    """The blocks that fit into ``TOTAL`` bytes."""
    with DeviceMemory(TOTAL, WEIGHTS).as_cuda():
        runner_of = partial(runner_over, loaded.model)
        return blocks_that_fit(config, loaded, runner_of, LONGEST, loaded.block_bytes, sizes, prompts)


def runner_over(model: CausalLM, pool: Tensor) -> ModelRunner:
    return ModelRunner(model, pool, 16, CPU)


class AlwaysDrafting:
    """Drafts as many tokens as it may."""

    wants_hidden = False

    def draft(self, sequences: Items[TokenSequence], limits: Items[int]) -> list[list[int]]:
        return [[0] * limit for limit in limits]

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None: ...

    def forget(self, sequence: TokenSequence) -> None: ...


def peak_of_serving(config: EngineConfig, loaded: LoadedRank, num_blocks: int) -> int:
    """The most memory that is used while as many requests run as may, which ask for everything."""
    device = DeviceMemory(TOTAL, WEIGHTS)
    drafts = config.speculative_method != "none"
    asked = ResolvedSampling(max_tokens=9, temperature=0.9, top_k=40, presence_penalty=0.1, logprobs=5)
    with device.as_cuda():
        runner = runner_over(loaded.model, loaded.new_pool(num_blocks))
        scheduler = Scheduler(config.limits(LONGEST), BlockPool(num_blocks, 16))
        speculator = Speculator(AlwaysDrafting(), config.num_speculative_tokens, VOCAB) if drafts else None
        engine = Engine(runner, scheduler, frozenset(), VOCAB, speculator=speculator)
        for at in range(config.sizes.max_num_seqs):
            engine.add(Sequence(f"{at}", 0, [at + 1] * 5, replace(asked, seed=at)))
        scored = ResolvedSampling(max_tokens=1, prompt_logprobs=5)
        engine.add(Sequence("scored", 0, list(range(200)), scored))
        while engine.has_work:
            engine.step()
    return device.peak


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_serving_stays_within_the_share_of_memory_and_fills_it(
    method: str, path: Path, loaded: LoadedRank
) -> None:
    config = config_of(path, device_memory_fraction=0.9, speculative_method=method)
    peak = peak_of_serving(config, loaded, fitting(config, loaded))
    assert 0.8 * TOTAL < peak <= 0.9 * TOTAL


def test_more_sequences_leave_fewer_blocks(path: Path, loaded: LoadedRank) -> None:
    """The rows of logits of each, in float32 and twice at least."""
    few, many = (fitting(config_of(path, max_num_seqs=count), loaded) for count in (8, 48))
    assert (few - many) * loaded.block_bytes > 2 * 40 * VOCAB * 4


def test_drafts_leave_fewer_blocks(path: Path, loaded: LoadedRank) -> None:
    none, drafted = (
        fitting(config_of(path, max_num_seqs=16, speculative_method=method), loaded)
        for method in ("none", "ngram")
    )
    assert (none - drafted) * loaded.block_bytes > 2 * 16 * 4 * VOCAB * 4


def test_the_largest_steps_are_as_large_as_a_step_may_be(path: Path) -> None:
    config = config_of(path, speculative_method="ngram", num_speculative_tokens=5)
    steps = list(largest_steps(config, 240))
    assert [sum(item.num_new for item in step.items) for step in steps] == [240, 240, 48, 240]
    assert [len(step.items) for step in steps] == [1, 48, 48, 40]
    assert [step.num_single for step in steps] == [0, 0, 48, 0]
    several = list(largest_steps(config_of(path, max_num_seqs=3), 50))
    assert [sum(item.num_new for item in step.items) for step in several] == [50, 150, 3], "of short prompts"


@dataclass
class Recordings:
    """Each takes memory of its own, the first that of its step besides."""

    first: int
    own: int
    kept: list[Tensor] = field(default_factory=list)

    def __call__(self, run: Callable[[], None]) -> Recording:
        self._take()
        return Replayed(run)

    @contextmanager
    def step(self) -> Iterator[None]:
        yield
        self._take()

    def begin(self) -> None: ...

    def end(self) -> Recording:
        return Replayed(lambda: None)

    def _take(self) -> None:
        self.kept.append(torch.empty(self.own + (0 if self.kept else self.first), dtype=torch.uint8))


@dataclass
class Replayed:
    replay: Callable[[], None]


def test_recordings_count(path: Path, loaded: LoadedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    config, sizes = config_of(path, max_num_seqs=32), graph_sizes(32)
    without = fitting(config, loaded)
    record = Recordings(5 << 20, 1 << 20)
    monkeypatch.setattr(graphs, "CudaRecord", lambda device: record)
    taken = (without - fitting(config, loaded, sizes)) * loaded.block_bytes
    assert len(record.kept) == memory.TRIED < len(sizes)
    expected = (5 << 20) + len(sizes) * (1 << 20)
    assert expected <= taken <= expected + 3 * loaded.block_bytes, "but for the buffers and a block of nobody"


def test_recordings_in_pieces_count(path: Path, loaded: LoadedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    config, sizes = config_of(path, max_num_seqs=32), piece_sizes(64)
    monkeypatch.setattr(graphs, "CudaRecord", lambda device: Recordings(5 << 20, 1 << 20))
    monkeypatch.setattr(pieces, "check_replay", lambda replay, written: None)
    without = fitting(config, loaded, graph_sizes(1))
    taken = (without - fitting(config, loaded, graph_sizes(1), sizes)) * loaded.block_bytes
    expected = (5 << 20) + len(sizes) * (1 << 20)
    assert expected <= taken <= expected + (3 << 20), "but for the buffers"


def test_a_recorder_that_measures() -> None:
    left = iter([100, 70, 66, 67, 61])
    record = MeasuredRecord(Recordings(0, 0), lambda: next(left))
    for _ in range(4):
        record(lambda: None)
    assert record.taken == [30, 4, 0, 6]
    assert record.all_of(4) == 30 + 3 * 6
    assert record.all_of(1) == 30
