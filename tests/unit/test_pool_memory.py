"""The pool as links see it: the same KV, whatever the block sizes and the heads of either side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.worker.memory import PoolMemory

LAYERS, DIM = 2, 4
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def pool_of(num_blocks: int, heads: int, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every element differs from all others that could be taken for it."""
    shape = (num_blocks, heads, LAYERS, 2, block_size, DIM)
    values = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def bits(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


def tokens_of(pool: Tensor, block_size: int, block: int, heads: range) -> Tensor:
    """A wire block by its definition."""
    page, sub = divmod(block, pool.shape[4] // block_size)
    return bits(pool[page, heads.start : heads.stop, :, :, sub * block_size : (sub + 1) * block_size])


def carry(views: list[memoryview], into: list[memoryview]) -> None:
    stream = b"".join(bytes(view) for view in views)
    assert len(stream) == sum(view.nbytes for view in into)
    for view in into:
        view[:], stream = stream[: view.nbytes], stream[view.nbytes :]


@st.composite
def some_heads(draw: st.DrawFn, count: int) -> tuple[int, range]:
    """A number of heads, and ``count`` adjacent ones of them."""
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return before + count + after, range(before, before + count)


@given(st.data())
def test_every_pool_gives_and_takes_the_same_wire_blocks(data: st.DataObject) -> None:
    wire, dtype = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(DTYPES))
    count = data.draw(st.integers(1, 3))
    pools, parts, heads = [], [], []
    for ratio in (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2)):
        num_heads, of_them = data.draw(some_heads(count))
        pools.append(pool_of(8 // ratio, num_heads, wire * ratio, dtype))
        parts.append(PoolMemory(pools[-1]).part(wire, of_them))
        heads.append(of_them)
    sent = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    landing = data.draw(st.permutations(range(8)))[: len(sent)]
    before = pools[1].clone()

    views = parts[0].source(sent)
    definition = [tokens_of(pools[0], wire, block, heads[0]) for block in sent]
    assert b"".join(bytes(view) for view in views) == b"".join(t.numpy().tobytes() for t in definition)
    assert parts[0].block_bytes == parts[1].block_bytes == definition[0].numel()
    into = parts[1].target(landing)
    carry(views, into)
    parts[1].landed(landing, into)

    for block, content in zip(landing, definition, strict=True):
        assert torch.equal(tokens_of(pools[1], wire, block, heads[1]), content)
        tokens_of(before, wire, block, heads[1]).copy_(content)
    assert torch.equal(bits(pools[1]), bits(before)), "something else changed as well"


def test_what_lands_leaves_the_rest_of_the_page_to_others() -> None:
    source, target = pool_of(1, 2, 4), torch.zeros(1, 2, LAYERS, 2, 4, DIM)
    parts = [PoolMemory(pool).part(1) for pool in (source, target)]
    first, second = (parts[1].target(blocks) for blocks in ([0, 3], [1, 2]))
    carry(parts[0].source([0, 3]), first)
    carry(parts[0].source([1, 2]), second)
    parts[1].landed([1, 2], second)
    parts[1].landed([0, 3], first)
    assert torch.equal(bits(target), bits(source))


def test_adjacent_pages_are_one_view_in_place() -> None:
    pool = pool_of(8, 2, 4)
    part = PoolMemory(pool).part(4)
    assert [view.nbytes for view in part.source([2, 3, 4, 7, 1])] == [n * part.block_bytes for n in (3, 1, 1)]
    part.target([5])[0][:] = bytes(part.block_bytes)
    assert not bits(pool[5]).any()


def test_a_range_of_heads_is_a_view_in_place_for_each_page() -> None:
    pool = pool_of(8, 4, 4)
    part = PoolMemory(pool).part(4, range(1, 3))
    assert len(part.source([2, 3])) == 2
    for view in part.target([5]):
        view[:] = bytes(view.nbytes)
    assert not bits(pool[5, 1:3]).any()


@pytest.mark.parametrize("block_size", [0, -4, 3, 8])
def test_a_block_size_that_does_not_divide_the_pools(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size {block_size} does not divide the pool's block size, 4"):
        PoolMemory(pool_of(2, 2, 4)).part(block_size)


@pytest.mark.parametrize("heads", [range(0), range(3), range(-1, 1), range(0, 2, 2)])
def test_heads_that_the_pool_does_not_have(heads: range) -> None:
    with pytest.raises(ValueError, match=r"adjacent heads out of 0 to 1 are allowed"):
        PoolMemory(pool_of(2, 2, 4)).part(4, heads)


@pytest.mark.parametrize("blocks", [[], [-1], [0, 4]])
@pytest.mark.parametrize("block_size", [2, 4])
def test_wire_blocks_that_the_pool_does_not_have(blocks: list[int], block_size: int) -> None:
    part = PoolMemory(pool_of(2 if block_size == 2 else 4, 2, 4)).part(block_size)
    with pytest.raises(ValueError, match="ids of 0 to 3 are allowed"):
        part.source(blocks)


def test_a_pool_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        PoolMemory(pool_of(2, 2, 4).transpose(0, 1))
