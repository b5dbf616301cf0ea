"""How much of one pool every load can use, whatever its layers keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.kv.block_pool import BlockPool
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.engine.sequence import Sequence
from baton_kernels.kv_layout import KVLayout, TokenKV
from baton_kernels.paged import PagedBatch
from tests.support.deep import all_deep_but
from tests.support.fake_engine import VOCAB_SIZE, fake_engine
from tests.support.grouped_model import KEPT

PAGES = 1500
BLOCK_SIZE = 4
LONG, SHORT = 400, 24
LOADS = {"long": (LONG,), "short": (SHORT,), "mixed": (LONG, SHORT, SHORT, SHORT)}
"""The prompts that come in turn, in tokens."""


class BlankModel:
    """Computes nothing, and likes token 0 best."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        return torch.zeros(len(token_ids) if batch.wanted is None else len(batch.wanted.rows), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.eye(1, VOCAB_SIZE).expand(len(hidden), -1).clone()


def filled(engine: Engine, lengths: tuple[int, ...]) -> float:
    """The largest share of the pool that is held before anyone loses pages, with more requests than fit. All
    have other prompts."""
    most, number = 0.0, 0
    while not engine.stats().scheduler.preemptions:
        while len(engine.scheduler.waiting) < 4:
            length = lengths[number % len(lengths)]
            prompt = [(number * 31 + at * 7) % VOCAB_SIZE for at in range(length)]
            prompt[:2] = divmod(number, VOCAB_SIZE)
            params = ResolvedSampling(max_tokens=2 * length, temperature=0.0, ignore_eos=True)
            engine.add(Sequence(f"r{number}", 1, prompt, params))
            number += 1
        engine.step()
        most = max(most, engine.stats().blocks.usage)
        if most >= 0.999 or number > 800:
            break
    return most


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kept", all_deep_but(1, [kept for kept in KEPT if kept != "window"]))
def test_every_load_fills_the_pool(kept: str, load: str) -> None:
    engine = fake_engine(
        PAGES,
        BLOCK_SIZE,
        kept=kept,
        max_num_seqs=600,
        max_num_batched_tokens=512,
        prefill_chunk=64,
        max_model_len=2000,
        model=BlankModel(),
    )
    assert filled(engine, LOADS[load]) >= 0.95


def test_a_window_holds_no_more_than_it_sees() -> None:
    """A sequence of 20,000 tokens, by the chunk and then token by token."""
    layout = KVLayout.of([(TokenKV(1, 2, 1, 512),), (TokenKV(1, 2, 1),)], 16, 4)
    limits = SchedulerLimits(4, 2048, 2048, 30_000)
    pool = BlockPool(3000, 16)
    scheduler = Scheduler(limits, pool, layout=layout)
    seq = Sequence("long", 1, [0] * 19_000, ResolvedSampling(max_tokens=2000))
    scheduler.add(seq)
    [window] = [number for number, group in enumerate(layout.groups) if group.kind == "window"]
    most = 0
    while seq.num_tokens < 20_000:
        batch = scheduler.schedule()
        scheduler.begin(batch)
        [item] = batch.items
        scheduler.advance(seq, item.num_new)
        scheduler.land(batch)
        if item.chooses:
            seq.append(0)
            most = max(most, len(seq.block_ids) - seq.num_gone(window))
    assert most * 16 <= 512 + 2 * 16
    scheduler.finish(seq, None)
    assert pool.num_held == 0
