"""Copies of whole KV blocks, all of a step in one launch.

A block is bytes, so it is copied in the widest words that it divides into; a thread moves two or more words
at a time, 16 bytes. The grid is (blocks, pieces of each), and bounded: swaps to host memory are as slow as
the bus whatever the number of programs, and the rest of the device is left to kernels that compute meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound

WORDS = 2048
"""Words that a program copies at a time: 16 KiB of 8 bytes each."""
MAX_PROGRAMS = 512
"""Most programs of one launch, unless it has more blocks than that."""


@bound
@triton.jit(do_not_specialize_on_alignment=["target_ids", "source_ids"])
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
    pieces = min(triton.cdiv(block_words, WORDS), max(1, MAX_PROGRAMS // count))
    _copy[(count, pieces)](
        to, target_ids, origin, source_ids, block_words, WORDS=WORDS, num_warps=4, enable_fp_fusion=True
    )


def _word(block_bytes: int) -> torch.dtype:
    """The widest integer type that divides a block into whole words."""
    for word in (torch.int64, torch.int32, torch.int16):
        if block_bytes % word.itemsize == 0:
            return word
    return torch.uint8
