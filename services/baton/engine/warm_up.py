"""The steps that a device runs before it serves, so that no kernel is compiled while a request waits.

Triton compiles a kernel at the first launch that differs in what it is compiled for: types, sizes of the
model, features. What differs from step to step (how many rows, where in memory a part of the step lies) is
none of that (``do_not_specialize`` at each kernel); 1, 2 and 16 rows would show if it were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.borrowed_pages import borrow_pages, moves_in_place
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Copy, Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence as EngineSequence
from baton.speculation.drafter import Drafter
from baton_kernels.blocks import copy_blocks

ROWS = (1, 2, 16)
PLAIN = ResolvedSampling(max_tokens=2)
GREEDY = ResolvedSampling(max_tokens=2, temperature=0.0)
SCORED = ResolvedSampling(max_tokens=2, prompt_logprobs=1)
EVERYTHING = ResolvedSampling(
    max_tokens=2,
    temperature=0.7,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    bad_word_ids=((1,),),
    allowed_token_ids=(0, 1, 2),
    logprobs=1,
)
"""A mask, rules of each kind, all filters, and log-probabilities."""


def warm_up_choices(runner: ModelRunner) -> None:
    """Runs decode steps of ``ROWS`` rows with each kind of choice, a prompt with log-probabilities and copies
    of blocks, in the pool's first block, while nobody owns any block."""
    for rows in ROWS:
        for params in (PLAIN, GREEDY, EVERYTHING):
            sequences = [_behind_prompt(params, runner) for _ in range(rows)]
            copies = tuple(Copy(seq, 0, 0, 0) for seq in sequences[:1])
            items = tuple(Scheduled(seq, 1, 1, chooses=True) for seq in sequences)
            runner.run(ScheduledBatch(items, rows, copies, moves=moves_in_place(items)))
    asking = EngineSequence("warm-up", 0, [0, 0], SCORED)
    borrow_pages(asking, runner.layout, 2, len(runner.pool))
    scored = (Scheduled(asking, 2, 0, chooses=True),)
    runner.run(ScheduledBatch(scored, 0, moves=moves_in_place(scored)))


def warm_up_continuation(runner: ModelRunner) -> None:
    """Runs a token of a prompt behind a block of it, while nobody owns any block: over latents, a chunk that
    is short beside what it sees has other kernels than the begin of a prompt."""
    before = runner.block_size
    seq = EngineSequence("warm-up", 0, [0] * (before + 1), PLAIN)
    borrow_pages(seq, runner.layout, 2, len(runner.pool))
    seq.num_computed = before
    items = (Scheduled(seq, 1, before, chooses=True),)
    runner.run(ScheduledBatch(items, 0, moves=moves_in_place(items)))


def warm_up_drafter(drafter: Drafter, prompts: Sequence[int]) -> None:
    """Lets a drafter draft behind prompts of these lengths. One that wants hidden states has no kernels but
    those of the model it drafts for."""
    if drafter.wants_hidden:
        return
    for num_tokens in prompts:
        seq = EngineSequence("warm-up", 0, [0] * num_tokens, PLAIN)
        seq.max_len = num_tokens + 2
        drafter.draft([seq], [2])
        drafter.forget(seq)


def warm_up_swaps(pool: Tensor) -> None:
    """Copies a block of a CUDA ``pool`` to pinned host memory and back, while nobody owns it."""
    slot = torch.empty((1, *pool.shape[1:]), dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
    ids = torch.zeros(1, dtype=torch.int64, device=pool.device)
    copy_blocks(slot, ids, pool, ids)
    copy_blocks(pool, ids, slot, ids)


def _behind_prompt(params: ResolvedSampling, runner: ModelRunner) -> EngineSequence:
    """A sequence whose last token, an output, is to be computed. All share the first pages: their tokens
    mean nothing."""
    seq = EngineSequence("warm-up", 0, [0], params)
    borrow_pages(seq, runner.layout, 2, len(runner.pool))
    seq.append(0)
    seq.num_computed = 1
    seq.rules = runner.rules(params, seq.prompt_ids, frozenset())
    return seq


class LateBuilds(Protocol):
    """The kernels that were compiled since the device was ready."""

    count: int


@dataclass(slots=True)
class NoBuilds:
    """:class:`LateBuilds` of a device whose kernels are not compiled while it serves."""

    count: int = 0


def late_builds(device: torch.device) -> LateBuilds:
    """Counts from now on. On CUDA, a count above 0 is a fault of the warm-up."""
    if device.type != "cuda":
        return NoBuilds()
    from baton_kernels.cuda.compilations import Compilations  # triton is only there where CUDA is

    return Compilations()
