"""An engine over a model that is quick, exact and unforgiving.

The model's next token is a function of every K and V it finds in the pool through the step's tables. A block
that was given away too early, copied wrongly or read in the wrong order changes the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Ids
from typing import Literal, cast

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.graphs import CudaRecord, GraphedModel, graph_sizes
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_memory import HostMemory
from baton.engine.kv.host_tier import HostTier
from baton.engine.model import Model
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.engine.sequence import Sequence
from baton.grammar.compiler import GrammarCompiler
from baton.speculation.drafter import Drafter
from baton.speculation.speculator import Speculator
from baton_kernels.paged import PagedBatch
from tests.support.grouped_model import GroupedModel, layout_of
from tests.support.late_runner import LateLauncher

VOCAB_SIZE = 97
Ahead = Literal["off", "at once", "late"]
AHEAD = "BATON_TEST_AHEAD"
"""The environment's word for whether the steps of tests that do not say so are launched ahead."""
_MODULUS = 65521


class FakeModel:
    """Writes each token's id as K and its position as V, in every head, layer and dimension.

    Works on any pool of the layout [num_blocks, heads, layers, 2, block_size, dim] whose dtype is exact up to
    the vocabulary's size and the longest context.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """[T] → [T, 1] int64 states."""
        slots = pool[batch.slot_blocks, :, :, :, batch.slot_offsets]  # [T, heads, layers, 2, dim]
        values = torch.stack([token_ids + 1, batch.positions + 1], dim=1)[:, None, None, :, None]
        pool[batch.slot_blocks, :, :, :, batch.slot_offsets] = values.to(pool.dtype).expand_as(slots)
        hidden = torch.zeros(len(token_ids), 1, dtype=torch.int64, device=token_ids.device)
        if batch.num_decode:
            hidden[: batch.num_decode, 0] = self._state(pool, batch.row_tables, batch.decode_contexts)
        for chunk in batch.chunks:
            contexts = torch.arange(chunk.context - chunk.length, chunk.context, device=token_ids.device) + 1
            tables = chunk.table.expand(chunk.length, -1)
            hidden[chunk.start : chunk.start + chunk.length, 0] = self._state(pool, tables, contexts)
        if batch.wanted is not None:  # by the tables that a last layer reads
            rows = batch.narrowed(batch.wanted)
            wanted = self._state(pool, rows.decode_tables, rows.decode_contexts)[:, None]
            assert torch.equal(wanted, hidden[batch.wanted.rows])
            return wanted
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, 1] → [R, V] float32 in 0 .. 10, scattered over the vocabulary."""
        token = torch.arange(self.vocab_size, device=hidden.device)
        scattered = ((hidden + 1) * (token * token * 7 + token * 131 + 3)) % _MODULUS
        return scattered.float() * (10 / _MODULUS)

    def _state(self, pool: Tensor, tables: Tensor, contexts: Tensor) -> Tensor:
        """[R, W] block ids and [R] contexts → [R] int64, different for different K and V in sight."""
        seen = pool[tables].long().sum(dim=(2, 3, 6))  # [R, W, 2, block_size]
        rows, width, _, block_size = seen.shape
        keys_values = seen.transpose(2, 3).reshape(rows, width * block_size, 2)
        at = torch.arange(width * block_size, device=pool.device)
        weights = torch.stack([at * at * 5 + at * 3 + 11, at * at * 13 + at * 7 + 2], dim=-1)
        mixed = (keys_values * weights % _MODULUS).sum(dim=-1)
        return (mixed * (at < contexts[:, None])).sum(dim=-1) % _MODULUS


def state_of(token_ids: Ids[int]) -> int:
    """What `FakeModel` makes of these tokens: its hidden state of the last of them."""
    size = 2 * 2 * 3  # heads, layers and dimensions of the pool of `fake_engine`
    keys = (size * (token + 1) * (at * at * 5 + at * 3 + 11) % _MODULUS for at, token in enumerate(token_ids))
    values = (size * (at + 1) * (at * at * 13 + at * 7 + 2) % _MODULUS for at in range(len(token_ids)))
    return (sum(keys) + sum(values)) % _MODULUS


class AlwaysCopy(BreakEven):
    """A copy is always the cheaper way, so that what is done does not hang on how fast this machine is."""

    def copying_pays(self, blocks: int) -> bool:
        return True


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    prefill_chunk: int = 16,
    max_model_len: int = 512,
    chunked_prefill: bool = True,
    prefix_caching: bool = True,
    priority_aging: float | None = None,
    mixed_prefill_tokens: int | None = None,
    host_blocks: int = 0,
    break_even: BreakEven | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    model: Model | None = None,
    vocab_size: int = VOCAB_SIZE,
    grammars: GrammarCompiler | None = None,
    drafter: Drafter | None = None,
    num_drafts: int = 4,
    ahead: Ahead | None = None,
    device: str = "cpu",
    graphs: bool = False,
    kept: str | None = None,
) -> Engine:
    """A small engine; its pool has two heads, two layers and three dimensions, in float32. ``host_blocks``
    are its host tier's; unless ``break_even`` says otherwise, copying always pays there. ``ahead``: whether
    steps are launched ahead, and when they are computed then; None: as the environment says, or not.
    ``graphs``: decode steps, and verifications of ``num_drafts`` drafts, are replayed, on CUDA. ``kept``: the
    name of a ``GroupedModel``'s layers, which the engine runs then."""
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        max_model_len=max_model_len,
        chunked_prefill=chunked_prefill,
        prefix_caching=prefix_caching,
        priority_aging=priority_aging,
        mixed_prefill_tokens=mixed_prefill_tokens,
    )
    layout = None if kept is None else layout_of(kept, block_size)
    shape: tuple[int, ...] = (2, 2, 2, block_size, 3)
    if layout is not None:
        model = model or GroupedModel(layout, vocab_size)
        shape = (layout.page_bytes // 4,)
    model = model or FakeModel(vocab_size)
    whole = torch.full((num_blocks + graphs, *shape), 777.0, device=device)
    kv = whole[:num_blocks]
    runner = ModelRunner(model, kv, block_size, kv.device, layout=layout)
    if graphs:
        width = min(num_blocks, -(-max_model_len // block_size))
        sizes = graph_sizes(max_num_seqs, 1 + num_drafts if drafter else 1)
        runner.replay(GraphedModel(model, whole, sizes, width, CudaRecord(whole.device)))
    ahead = ahead or cast(Ahead, os.environ.get(AHEAD, "off"))
    runner.launcher = {"off": None, "at once": runner, "late": LateLauncher(runner)}[ahead]
    tier = host = None
    if host_blocks:
        break_even = break_even or AlwaysCopy(block_size)
        tier, host = HostTier(host_blocks, break_even), HostMemory(kv, host_blocks, break_even)
    blocks = BlockPool(num_blocks, block_size, tier.save if tier else None)
    speculator = Speculator(drafter, num_drafts, vocab_size) if drafter else None
    scheduler = Scheduler(limits, blocks, tier, layout)
    return Engine(runner, scheduler, eos_token_ids, vocab_size, host, grammars, speculator)


def run(engine: Engine, *sequences: Sequence, max_steps: int = 1000) -> list[list[int]]:
    """Adds the sequences and steps until nothing is left to do. Their outputs."""
    for seq in sequences:
        engine.add(seq)
    for _ in range(max_steps):
        if not engine.has_work:
            return [list(seq.output_ids) for seq in sequences]
        engine.step()
    raise AssertionError(f"still at work after {max_steps} steps: {engine.stats()}")


def run_alone(
    prompt_ids: Ids[int],
    params: ResolvedSampling,
    eos_token_ids: frozenset[int] = frozenset(),
    kept: str | None = None,
) -> list[int]:
    """What a request yields with an engine to itself: no chunks, no cache, no want of blocks."""
    engine = fake_engine(
        256 if kept is None else 2000,
        max_num_batched_tokens=1024,
        prefill_chunk=1024,
        prefix_caching=False,
        eos_token_ids=eos_token_ids,
        kept=kept,
    )
    [outputs] = run(engine, Sequence("alone", 1, prompt_ids, params))
    return outputs
