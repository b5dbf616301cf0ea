"""How many KV blocks a device has memory for: beside a step at its peak, and beside the recordings of decode
steps. Both are measured in a small pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.borrowed_pages import borrow_pages, moves_in_place
from baton.engine.config import EngineConfig
from baton.engine.graphs import GraphedModel, GraphRecorder, GraphSize, Recording, recorder_of
from baton.engine.model import Model
from baton.engine.pieces import PieceRecorder, PiecewiseModel
from baton.engine.rank_start import LoadedRank, checked_blocks, spare_device_memory
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.parallel.messages import Scratch, Spare, TryRecordings
from baton_kernels.kv_layout import KVLayout

MOST_TOLD = 20
"""Likeliest tokens whose log-probabilities are asked for in the steps that are measured."""
TRIED = 3
"""Recordings that are made to estimate the memory of all. The first one takes the memory of its step, where
those after it, which are smaller, find room; what each of these takes is its own."""


class StepRecorder(GraphRecorder, PieceRecorder, Protocol):
    """A recorder of steps, whole or in pieces."""


def blocks_that_fit(
    config: EngineConfig,
    loaded: LoadedRank,
    runner_of: Callable[[Tensor], ModelRunner],
    longest: int,
    block_bytes: int,
    sizes: tuple[GraphSize, ...],
    pieces: tuple[int, ...] = (),
    reserved: int = 0,
) -> int:
    """Blocks that every rank's device has memory for beside the largest steps. ``longest``: tokens of the
    longest sequence; ``block_bytes``: bytes of a block on this rank; ``sizes``: the steps to record; with
    any, each rank has a block that belongs to nobody. ``pieces``: tokens of the steps with prompts to record.
    ``reserved``: bytes that this rank needs besides."""
    size = config.sizes.block_size
    most = min(longest, config.sizes.max_num_batched_tokens)
    num_scratch = (most // size + 1) * loaded.layout.num_tables + loaded.layout.state_pages + 1
    pool = loaded.new_pool(num_scratch)
    runner = runner_of(pool)
    if runner.ranks is not None:
        question = runner.ranks.question()
        runner.ranks.ask(question, Scratch(question, num_scratch))
    torch.cuda.reset_peak_memory_stats(loaded.device)
    for batch in largest_steps(config, longest):
        for item in batch.items:
            seq = item.sequence
            seq.rules = runner.rules(seq.params, seq.prompt_ids, frozenset())
            borrow_pages(seq, loaded.layout, -(-item.num_new // size), num_scratch)
        runner.run(replace(batch, moves=moves_in_place(batch.items)))
    peak = torch.cuda.max_memory_allocated(loaded.device) - pool.nbytes
    recorded = _try_recordings(runner, pool, sizes, -(-longest // size)) if sizes else 0
    recorded += pieces_bytes(runner.model, pool, pieces, loaded.layout) if pieces else 0
    del runner.pool, pool
    budget = spare_device_memory(loaded.device, peak, config.device_memory_fraction) - recorded - reserved
    counts = [checked_blocks(budget, block_bytes, int(bool(sizes)))]
    if runner.ranks is not None:
        question = runner.ranks.question()
        spare = Spare(question, config.device_memory_fraction, int(bool(sizes)))
        counts += runner.ranks.ask(question, spare)
    return min(counts)


def largest_steps(config: EngineConfig, longest: int) -> Iterator[ScheduledBatch]:
    """The steps that take the most memory, with sequences of up to ``longest`` tokens: one prompt that is
    scored; as many prompts as may run, each due a token; and as many answers, with drafts if there are any.
    All ask for all that is made of logits."""
    params = ResolvedSampling(
        max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=MOST_TOLD
    )
    scored = ResolvedSampling(max_tokens=1, prompt_logprobs=MOST_TOLD)
    budget, most = config.sizes.max_num_batched_tokens, config.sizes.max_num_seqs
    yield _step(1, min(longest, budget), scored)
    yield _step(most, min(longest, budget // most), params)
    yield _step(most, 1, params)
    if config.speculative_method != "none":
        drafts = config.num_speculative_tokens
        yield _step(max(1, min(most, budget // (1 + drafts))), 1, params, drafts)


def _step(count: int, length: int, params: ResolvedSampling, drafts: int = 0) -> ScheduledBatch:
    """A step of ``count`` sequences of ``length`` tokens."""
    sequences = [Sequence(f"largest-{at}", 0, [0] * length, params) for at in range(count)]
    num_new = length + drafts
    return ScheduledBatch(
        tuple(Scheduled(seq, num_new, 0, chooses=True) for seq in sequences),
        count if num_new == 1 else 0,
        drafts={seq: [0] * drafts for seq in sequences} if drafts else {},
    )


def _try_recordings(runner: ModelRunner, pool: Tensor, sizes: tuple[GraphSize, ...], width: int) -> int:
    """What the recordings of ``sizes`` take on this rank. All others find out at the same time."""
    if runner.ranks is None:
        return recordings_bytes(runner.model, pool, sizes, width, runner.layout)
    question = runner.ranks.question()
    runner.ranks.tell(TryRecordings(question, sizes, width))
    taken = recordings_bytes(runner.model, pool, sizes, width, runner.layout)
    runner.ranks.answers(question)
    return taken


def recordings_bytes(
    model: Model,
    pool: Tensor,
    sizes: Items[GraphSize],
    width: int,
    layout: KVLayout | None = None,
) -> int:
    """The memory that the recordings of ``sizes`` take, in bytes, estimated from the largest ones, which are
    made and given up. The pool's last block must belong to nobody."""
    record = MeasuredRecord(recorder_of(pool.device), partial(_free_memory, pool.device))
    GraphedModel(model, pool, sizes[-TRIED:], width, record, layout)
    return record.all_of(len(sizes))


def pieces_bytes(model: Model, pool: Tensor, sizes: tuple[int, ...], layout: KVLayout | None = None) -> int:
    """The memory that the recordings in pieces of steps of ``sizes`` tokens take, in bytes, estimated like
    those of decode steps."""
    record = MeasuredRecord(recorder_of(pool.device), partial(_free_memory, pool.device))
    PiecewiseModel(model, pool, sizes[-TRIED:], record, layout)
    return record.all_of(len(sizes))


class MeasuredRecord:
    """A recorder of whole steps, or of steps in pieces, that tells what the recordings of another one
    take."""

    def __init__(self, record: StepRecorder, free: Callable[[], int]) -> None:
        """``free`` returns the bytes that the device has left."""
        self._record = record
        self._free = free
        self._left = free()
        self.taken: list[int] = []
        """The bytes of each recording; the first one's with all that was made since this recorder was."""

    def __call__(self, run: Callable[[], None]) -> Recording:
        recording = self._record(run)
        self._measure()
        return recording

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._record.step():
            yield
        self._measure()

    def begin(self) -> None:
        self._record.begin()

    def end(self) -> Recording:
        return self._record.end()

    def _measure(self) -> None:
        left = self._free()
        self.taken.append(max(0, self._left - left))
        self._left = left

    def all_of(self, count: int) -> int:
        """The bytes of ``count`` recordings of which these are the first."""
        first, *others = self.taken
        return first + (count - 1) * max(others, default=0)


def _free_memory(device: torch.device) -> int:
    """The device's free memory, in bytes, with what torch keeps for later given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
