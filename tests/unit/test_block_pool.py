"""The block pool's promises, one by one. Their combinations: tests/property/test_block_pool_machine.py."""

from __future__ import annotations

from array import array

import pytest

from baton.core.block_hash import hash_blocks
from baton.engine.kv.block_pool import BlockAccountingError, BlockPool


def take(pool: BlockPool, n: int) -> list[int]:
    blocks = pool.allocate(n)
    assert blocks is not None
    return blocks


def committed(pool: BlockPool, n: int, name: bytes = b"") -> tuple[list[int], list[bytes]]:
    """Allocates ``n`` blocks and enters them into the index."""
    blocks = take(pool, n)
    hashes = [name + bytes([i]) for i in range(n)]
    for block, digest in zip(blocks, hashes, strict=True):
        assert pool.commit(block, digest) == block
    return blocks, hashes


class TestAllocation:
    def test_is_all_or_nothing(self) -> None:
        pool = BlockPool(4, 16)
        take(pool, 2)
        assert pool.allocate(3) is None
        assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 2)
        assert len(take(pool, 2)) == 2
        assert pool.allocate(1) is None
        assert pool.allocate(0) == []

    def test_gives_neighbours_in_ascending_order(self) -> None:
        pool = BlockPool(16, 16)
        first = take(pool, 4)
        second = take(pool, 4)
        pool.free(first)
        assert take(pool, 4) == first
        assert second == list(range(second[0], second[0] + 4))

    def test_continues_after_a_block(self) -> None:
        pool = BlockPool(16, 16)
        blocks = take(pool, 12)
        pool.free(blocks)
        assert pool.allocate(3, after=6) == [7, 8, 9]
        # 10 is taken: no neighbour to prefer, and the last block has none.
        assert pool.allocate(1, after=9) == [10]
        assert pool.allocate(1, after=15) == [0]

    def test_does_not_evict_for_the_sake_of_neighbours(self) -> None:
        pool = BlockPool(4, 16)
        blocks, _ = committed(pool, 2)
        pool.free(blocks)
        assert pool.allocate(2, after=-1) == [2, 3]
        assert pool.num_cached == 2

    def test_evicts_the_longest_unused_and_the_end_of_a_sequence_first(self) -> None:
        pool = BlockPool(4, 16)
        old, old_hashes = committed(pool, 2, b"old")
        new, new_hashes = committed(pool, 2, b"new")
        pool.free(old)
        pool.free(new)
        assert take(pool, 1) == [old[1]]
        assert pool.match_prefix(old_hashes) == [old[0]]
        assert take(pool, 1) == [new[1]]
        assert pool.match_prefix(new_hashes) == [new[0]]


class TestReferencesAndPins:
    def test_a_block_is_allocatable_only_without_either(self) -> None:
        pool = BlockPool(1, 16)
        [block] = take(pool, 1)
        pool.pin([block])
        pool.free([block])
        assert pool.allocate(1) is None
        assert (pool.refs(block), pool.pins(block), pool.num_held) == (0, 1, 1)
        pool.ref([block])
        pool.unpin([block])
        assert pool.allocate(1) is None
        pool.free([block])
        assert pool.allocate(1) == [block]

    def test_a_shared_block_outlives_its_first_owner(self) -> None:
        pool = BlockPool(2, 16)
        blocks = take(pool, 2)
        pool.ref(blocks)
        pool.free(blocks)
        assert pool.num_held == 2
        pool.free(blocks)
        assert pool.num_free == 2

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda pool: pool.free([0]),
            lambda pool: pool.unpin([0]),
            lambda pool: pool.pin([0]),
            lambda pool: pool.ref([0]),
            lambda pool: pool.commit(0, b"digest"),
            lambda pool: pool._take(1),
        ],
    )
    def test_misuse_is_refused(self, misuse: object) -> None:
        pool = BlockPool(2, 16)
        assert pool.allocate(1, after=0) == [1]
        assert callable(misuse)
        with pytest.raises(BlockAccountingError):
            misuse(pool)
        assert (pool.num_free, pool.num_held) == (1, 1)

    def test_a_double_free_is_refused(self) -> None:
        pool = BlockPool(2, 16)
        blocks = take(pool, 1)
        pool.free(blocks)
        with pytest.raises(BlockAccountingError, match="without a reference"):
            pool.free(blocks)


class TestPrefixIndex:
    def test_finds_freed_blocks_until_they_are_evicted(self) -> None:
        pool = BlockPool(3, 16)
        blocks, hashes = committed(pool, 2)
        pool.free(blocks)
        assert (pool.num_free, pool.num_cached) == (1, 2)
        assert pool.match_prefix([*hashes, b"more"]) == blocks
        assert pool.num_held == 2
        pool.free(blocks)
        take(pool, 2)  # the free block and the end of the prefix
        assert pool.match_prefix(hashes) == blocks[:1]

    def test_keeps_the_first_of_two_blocks_with_the_same_content(self) -> None:
        pool = BlockPool(2, 16)
        first, second = take(pool, 2)
        assert pool.commit(first, b"digest") == first
        assert pool.commit(second, b"digest") == first
        assert pool.commit(first, b"digest") == first
        pool.free([first, second])
        assert (pool.num_free, pool.num_cached) == (1, 1)

    def test_refuses_a_second_content(self) -> None:
        pool = BlockPool(1, 16)
        [block] = take(pool, 1)
        pool.commit(block, b"one")
        with pytest.raises(BlockAccountingError, match="different content"):
            pool.commit(block, b"two")


class TestHashes:
    def test_cover_full_blocks_only(self) -> None:
        assert hash_blocks(range(3), 4) == []
        assert len(hash_blocks(range(11), 4)) == 2
        assert hash_blocks(range(11), 4) == hash_blocks(range(8), 4)

    def test_continue_from_a_parent(self) -> None:
        whole = hash_blocks(range(16), 4, b"tenant")
        head = hash_blocks(range(9), 4, b"tenant")
        assert whole == head + hash_blocks(range(16), 4, b"tenant", start=8, parent=head[-1])
        assert hash_blocks(array("q", range(16)), 4, b"tenant") == whole

    def test_depend_on_everything_before_and_on_the_salt(self) -> None:
        base = hash_blocks([1, 2, 3, 4], 2)
        assert base[1] != hash_blocks([1, 9, 3, 4], 2)[1]
        assert base[1] != hash_blocks([3, 4], 2)[0]
        assert set(base).isdisjoint(hash_blocks([1, 2, 3, 4], 2, b"tenant"))
        assert base[0] != hash_blocks([1, 2, 3, 4], 4)[0]

    def test_depend_on_what_blocks_hold(self) -> None:
        base, fp8 = hash_blocks([1, 2, 3, 4], 2), hash_blocks([1, 2, 3, 4], 2, kv_dtype="fp8")
        assert set(base).isdisjoint(fp8)
        assert set(fp8).isdisjoint(hash_blocks([1, 2, 3, 4], 2, b"fp8"))
        assert fp8[1:] == hash_blocks([1, 2, 3, 4], 2, start=2, parent=fp8[0], kv_dtype="fp8")
