"""The pool as links see it: the same KV, whatever the block sizes and the heads of either side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.transport.base import BlockForm, GroupPart, PageMemory
from baton.transport.pool_memory import PoolMemory

LAYERS, DIM = 2, 4
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def pool_of(
    num_blocks: int, heads: int, block_size: int, dtype: torch.dtype = torch.float32, layers: int = LAYERS
) -> Tensor:
    """Random bytes, so that each element differs from what could be taken for it."""
    shape = (num_blocks, heads, layers, 2, block_size, DIM)
    values = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def bits(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


def tokens_of(pool: Tensor, block_size: int, block: int, heads: range, layers: range) -> Tensor:
    """A wire block by its definition."""
    page, sub = divmod(block, pool.shape[4] // block_size)
    part = pool[page, heads.start : heads.stop, layers.start : layers.stop]
    return bits(part[:, :, :, sub * block_size : (sub + 1) * block_size])


def taken(part: PageMemory, blocks: list[int]) -> bytes:
    """The wire blocks' bytes, in place where that is possible; a copy must be the same."""
    copy = bytearray(len(blocks) * part.form_of([0]).nbytes)
    part.gather(blocks, memoryview(copy))
    views = part.in_place(blocks)
    assert not views or b"".join(views) == copy
    return bytes(copy)


def given_to(part: PageMemory, blocks: list[int], content: bytes, *, in_place: bool) -> None:
    views = part.in_place(blocks) if in_place else []
    if not views:
        part.scatter(blocks, memoryview(bytearray(content)))
    for view in views:
        view[:], content = content[: view.nbytes], content[view.nbytes :]


@st.composite
def some_of(draw: st.DrawFn, count: int) -> tuple[int, range]:
    """A number of heads or layers, and ``count`` adjacent ones of them."""
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return before + count + after, range(before, before + count)


@given(st.data())
def test_every_pool_gives_and_takes_the_same_wire_blocks(data: st.DataObject) -> None:
    wire, dtype = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(DTYPES))
    counts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    pools, parts, cuts = [], [], []
    for ratio in (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2)):
        (num_heads, heads), (num_layers, layers) = (data.draw(some_of(count)) for count in counts)
        pools.append(pool_of(8 // ratio, num_heads, wire * ratio, dtype, num_layers))
        parts.append(PoolMemory(pools[-1]).part(wire, [GroupPart(heads, layers)]))
        cuts.append((heads, layers))
    sent = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    landing = data.draw(st.permutations(range(8)))[: len(sent)]
    before = pools[1].clone()

    content = taken(parts[0], sent)
    definition = [tokens_of(pools[0], wire, block, *cuts[0]) for block in sent]
    assert content == b"".join(tokens.numpy().tobytes() for tokens in definition)
    assert parts[0].form_of([0]) == parts[1].form_of([0]) == BlockForm(1, definition[0].numel())
    given_to(parts[1], landing, content, in_place=data.draw(st.booleans()))

    for block, tokens in zip(landing, definition, strict=True):
        assert torch.equal(tokens_of(pools[1], wire, block, *cuts[1]), tokens)
        tokens_of(before, wire, block, *cuts[1]).copy_(tokens)
    assert torch.equal(bits(pools[1]), bits(before)), "something else changed as well"


def test_a_scattered_piece_leaves_the_rest_of_the_page_to_others() -> None:
    source, target = pool_of(1, 2, 4), torch.zeros(1, 2, LAYERS, 2, 4, DIM)
    parts = [PoolMemory(pool).part(1) for pool in (source, target)]
    first, second = taken(parts[0], [0, 3]), taken(parts[0], [1, 2])
    given_to(parts[1], [1, 2], second, in_place=False)
    given_to(parts[1], [0, 3], first, in_place=False)
    assert torch.equal(bits(target), bits(source))


def test_adjacent_pages_are_one_view_in_place() -> None:
    pool = pool_of(8, 2, 4)
    part = PoolMemory(pool).part(4)
    assert [view.nbytes for view in part.in_place([2, 3, 4, 7, 1])] == [
        count * part.form_of([0]).nbytes for count in (3, 1, 1)
    ]
    part.in_place([5])[0][:] = bytes(part.form_of([0]).nbytes)
    assert not bits(pool[5]).any()


def test_a_range_of_heads_is_a_view_in_place_for_each_page() -> None:
    pool = pool_of(8, 4, 4)
    part = PoolMemory(pool).part(4, [GroupPart(range(1, 3), range(LAYERS))])
    assert len(part.in_place([2, 3])) == 2
    for view in part.in_place([5]):
        view[:] = bytes(view.nbytes)
    assert not bits(pool[5, 1:3]).any()


def test_some_layers_are_a_view_in_place_for_each_head_of_a_page() -> None:
    pool = pool_of(8, 4, 4, layers=3)
    part = PoolMemory(pool).part(4, [GroupPart(range(1, 3), range(1, 3))])
    assert len(part.in_place([2, 3])) == 4
    for view in part.in_place([5]):
        view[:] = bytes(view.nbytes)
    assert not bits(pool[5, 1:3, 1:3]).any()


@pytest.mark.parametrize("heads", [None, range(1, 2)])
def test_all_views_lie_in_the_whole_where_there_are_any(heads: range | None) -> None:
    pool = pool_of(4, heads=2, block_size=16)
    parts = None if heads is None else [GroupPart(heads, range(LAYERS))]
    whole = PoolMemory(pool).part(16, parts).whole()
    assert isinstance(whole, memoryview)
    assert bytes(whole) == bytes(bits(pool).flatten().tolist())
    assert PoolMemory(pool).part(8, parts).whole() is None


def test_parts_of_a_page_are_not_contiguous() -> None:
    assert PoolMemory(pool_of(8, 2, 4)).part(2).in_place([0, 1]) == []


@pytest.mark.parametrize("block_size", [0, -4, 3, 8])
def test_a_block_size_that_does_not_divide_the_pools(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size {block_size} does not divide the pool's block size, 4"):
        PoolMemory(pool_of(2, 2, 4)).part(block_size)


@pytest.mark.parametrize("heads", [range(0), range(3), range(-1, 1), range(0, 2, 2)])
def test_heads_that_the_pool_does_not_have(heads: range) -> None:
    with pytest.raises(ValueError, match=r"adjacent heads out of 0 to 1 are allowed"):
        PoolMemory(pool_of(2, 2, 4)).part(4, [GroupPart(heads, range(LAYERS))])


@pytest.mark.parametrize("layers", [range(0), range(3), range(-1, 1), range(0, 2, 2)])
def test_layers_that_the_pool_does_not_have(layers: range) -> None:
    with pytest.raises(ValueError, match=r"adjacent layers out of 0 to 1 are allowed"):
        PoolMemory(pool_of(2, 2, 4)).part(4, [GroupPart(range(2), layers)])


@pytest.mark.parametrize("blocks", [[], [-1], [0, 4]])
@pytest.mark.parametrize("block_size", [2, 4])
def test_wire_blocks_that_the_pool_does_not_have(blocks: list[int], block_size: int) -> None:
    part = PoolMemory(pool_of(2 if block_size == 2 else 4, 2, 4)).part(block_size)
    with pytest.raises(ValueError, match="ids of 0 to 3 are allowed"):
        part.in_place(blocks)
    with pytest.raises(ValueError, match="ids of 0 to 3 are allowed"):
        part.gather(blocks, memoryview(bytearray(8 * part.form_of([0]).nbytes)))


def test_a_pool_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        PoolMemory(pool_of(2, 2, 4).transpose(0, 1))
