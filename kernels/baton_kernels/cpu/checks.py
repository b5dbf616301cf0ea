"""What the CPU's kernels are given, checked before they read or write memory: they believe sizes and the
numbers of pages. Every refusal is a ValueError.

Pages are checked once for each step and table (states: and layer), which takes microseconds; shapes wherever
they are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.paged import PagedBatch, StateRows
from baton_kernels.state_pages import LayerStates


def check_batch(batch: PagedBatch, num_blocks: int, block_size: int) -> None:
    """Check that the tokens of a step, and the contexts of its chunks, lie in a pool of ``num_blocks``
    blocks."""
    blocks, offsets = batch.slot_blocks, batch.slot_offsets
    check_numbers("slot_blocks", blocks, blocks.shape)
    check_numbers("slot_offsets", offsets, blocks.shape)
    tokens = len(blocks)
    check_range("slot_blocks", blocks, 0, num_blocks)
    check_range("slot_offsets", offsets, 0, block_size)
    start = batch.num_decode
    for chunk in batch.chunks:
        if chunk.start != start or chunk.length < 1 or chunk.start + chunk.length > tokens:
            raise ValueError(f"a chunk of rows {chunk.start} and {chunk.length} more, of a step of {tokens}")
        start += chunk.length
        named = -(-chunk.context // block_size)
        if not chunk.length <= chunk.context or len(chunk.table) < named:
            raise ValueError(
                f"a context of {chunk.context} tokens in {len(chunk.table)} blocks of {block_size}"
            )
        check_numbers("a chunk's table", chunk.table, chunk.table.shape)
        check_range("a chunk's table", chunk.table[:named], 0, num_blocks)
    if start > tokens:
        raise ValueError(f"{start} rows are named of a step of {tokens}")


def check_rows(tables: Tensor, contexts: Tensor, rows: int, num_blocks: int, block_size: int) -> None:
    """Check the block tables [rows, blocks] and contexts [rows] of the rows of a step."""
    check_numbers("block tables", tables, (rows, tables.shape[1]))
    check_numbers("contexts", contexts, (rows,))
    check_range("block tables", tables, 0, num_blocks)
    check_range("contexts", contexts, 0, tables.shape[1] * block_size + 1)


def check_states(states: LayerStates, rows: StateRows, tokens: int) -> None:
    """Check that the states of ``tokens`` rows lie in the pool's pages, as many of a state as its group
    has."""
    pages, kv, group = states.pages, states.kv, states.group
    room = group.per_page * kv.size
    if pages.dtype != torch.float32 or pages.dim() != 2 or pages.stride(1) != 1 or pages.shape[1] < room:
        raise ValueError(
            f"pages are {tuple(pages.shape)} {pages.dtype}; {room} float32 numbers each are needed"
        )
    if states.layer < 0 or (states.layer + 1) * kv.units > group.per_page * len(group.tables):
        raise ValueError(f"layer {states.layer} of states in {len(group.tables)} pages of {group.per_page}")
    width, end = len(group.tables), len(pages)
    last = rows.segments[-1] if rows.segments else None
    named = len(rows.decode_targets) if last is None else last.start + last.length
    sequences = len(rows.decode_sources)
    if named > tokens or (sequences and len(rows.decode_targets) % sequences):
        raise ValueError(f"{named} rows of {sequences} sequences are named of a step of {tokens}")
    check_pages(rows.decode_sources, width, end)
    check_pages(rows.decode_targets, width, end)
    for segment in rows.segments:
        check_pages(segment.source[None], width, end)
        check_pages(segment.target[None], width, end, first=0)


def check_pages(tables: Tensor, width: int, end: int, first: int | None = None) -> None:
    """Check the pages [n, width] of states; below ``first`` (None: any) there is none."""
    if not len(tables):
        return
    check_numbers("the pages of states", tables, (len(tables), width))
    check_range("the pages of states", tables, -(2**62) if first is None else first, end)


def check_numbers(name: str, numbers: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Check that a tensor is int64, of this shape and in one piece."""
    if numbers.dtype != torch.int64 or numbers.shape != shape or not numbers.is_contiguous():
        raise ValueError(
            f"{name} are {tuple(numbers.shape)} {numbers.dtype}; allowed: {tuple(shape)} int64 in one piece"
        )


def check_range(name: str, numbers: Tensor, first: int, end: int) -> None:
    """Check that all numbers are ``first`` at least, and below ``end``."""
    if not numbers.numel():
        return
    least, most = map(int, numbers.aminmax())
    if least < first or most >= end:
        raise ValueError(f"{name} name {least} to {most}; allowed: {max(first, 0)} to {end - 1}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that a tensor has this shape and type."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; allowed: {shape} {dtype}")
