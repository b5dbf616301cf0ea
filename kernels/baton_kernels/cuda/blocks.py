"""Whole KV blocks from place to place, all of a step in one launch.

A block is bytes, so it is copied in the widest words that it divides into; a thread moves two or more of them
at a time, 16 bytes. The grid is (blocks, pieces of each), and bounded: swaps to host memory are as slow as
the bus whatever the number of programs, which should be left to those that compute meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048
"""Words that a program copies at a time: 16 KiB of 8 bytes each."""
MOST_PROGRAMS = 512
"""Of one launch, unless there are more blocks than that."""


@triton.jit
def _copy(
    target: tl.tensor,
    target_ids: tl.tensor,
    source: tl.tensor,
    source_ids: tl.tensor,
    block_words: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    to = target + tl.load(target_ids + block) * block_words
    origin = source + tl.load(source_ids + block) * block_words
    # A block of all layers may have more bytes than an int32 counts, never more words.
    for at in range(tl.program_id(1) * WORDS, block_words, tl.num_programs(1) * WORDS):
        words = at + tl.arange(0, WORDS)
        real = words < block_words
        tl.store(to + words, tl.load(origin + words, mask=real), mask=real)


def copy_blocks(target: Tensor, target_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
    """See ``baton_kernels.blocks``."""
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(f"blocks must lie behind each other, not {target.stride()}, {source.stride()} apart")
    count = target_ids.numel()
    if not count or not target[0].numel():
        return
    word = _word(target[0].nbytes)
    to, origin = (tensor.view(tensor.shape[0], -1).view(word) for tensor in (target, source))
    block_words = to.shape[1]
    pieces = min(triton.cdiv(block_words, WORDS), max(1, MOST_PROGRAMS // count))
    _copy[(count, pieces)](
        to, target_ids, origin, source_ids, block_words, WORDS=WORDS, num_warps=4, enable_fp_fusion=True
    )


def _word(block_bytes: int) -> torch.dtype:
    """The widest integer that a block is a whole number of."""
    for word in (torch.int64, torch.int32, torch.int16):
        if block_bytes % word.itemsize == 0:
            return word
    return torch.uint8
