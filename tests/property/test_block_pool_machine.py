"""The block pool against a model of it that is too simple to be wrong: two Python lists and a dict.

``PROPERTY_EXAMPLES`` (default 60) sets how many histories are tried, ``PROPERTY_STEPS`` (default 60) how long
they are.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.kv.block_pool import BlockAccountingError, BlockPool

PICK = st.integers(0, 1 << 16)
CONTENTS = st.integers(0, 5)


def digest(content: int) -> bytes:
    return bytes([content])


class BlockPoolMachine(RuleBasedStateMachine):
    """``free`` is a stack and ``cached`` a queue of allocatable blocks; ``holds`` and ``pins`` are bags."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))  # next to be given away first
        self.cached: list[int] = []  # likewise
        self.holds: list[list[int]] = []
        self.pins: list[list[int]] = []
        self.contents: dict[int, int] = {}  # block → what the index finds in it

    def refs(self, block: int) -> int:
        return sum(hold.count(block) for hold in self.holds)

    def pinned(self, block: int) -> int:
        return sum(pin.count(block) for pin in self.pins)

    def give_back(self, blocks: list[int]) -> None:
        """The model's half of free and unpin; ``blocks`` just left holds or pins."""
        remaining = Counter(blocks)
        for block in reversed(blocks):
            remaining[block] -= 1
            if self.refs(block) or self.pinned(block) or remaining[block]:
                continue
            if block in self.contents:
                self.cached.append(block)
            else:
                self.free.insert(0, block)

    @rule(n=st.integers(0, 5), after=st.none() | st.integers(0, 8))
    def allocate(self, n: int, after: int | None) -> None:
        blocks = self.pool.allocate(n, after)
        if n > len(self.free) + len(self.cached):
            assert blocks is None
            return
        expected = []
        for _ in range(n):
            if after is not None and after + 1 in self.free:
                block = after + 1
                self.free.remove(block)
            elif self.free:
                block = self.free.pop(0)
            else:
                block = self.cached.pop(0)
                del self.contents[block]
            expected.append(block)
            after = block
        assert blocks == sorted(expected)
        for block in expected:
            assert self.refs(block) == self.pinned(block) == 0
        if expected:
            self.holds.append(blocks)

    @precondition(lambda self: self.holds)
    @rule(pick=PICK)
    def free_blocks(self, pick: int) -> None:
        blocks = self.holds.pop(pick % len(self.holds))
        self.pool.free(blocks)
        self.give_back(blocks)

    @precondition(lambda self: self.holds or self.pins)
    @rule(pick=PICK, pin=st.booleans())
    def share_or_pin(self, pick: int, pin: bool) -> None:
        bags = self.holds + self.pins
        blocks = list(bags[pick % len(bags)])
        if pin:
            self.pool.pin(blocks)
            self.pins.append(blocks)
        else:
            self.pool.ref(blocks)
            self.holds.append(blocks)

    @precondition(lambda self: self.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        blocks = self.pins.pop(pick % len(self.pins))
        self.pool.unpin(blocks)
        self.give_back(blocks)

    @precondition(lambda self: self.holds)
    @rule(pick=PICK, content=CONTENTS)
    def commit(self, pick: int, content: int) -> None:
        blocks = [block for hold in self.holds for block in hold]
        block = blocks[pick % len(blocks)]
        if self.contents.get(block, content) != content:
            with pytest.raises(BlockAccountingError):
                self.pool.commit(block, digest(content))
            return
        first = next((b for b, c in self.contents.items() if c == content), block)
        assert self.pool.commit(block, digest(content)) == first
        if first == block:
            self.contents[block] = content

    @rule(contents=st.lists(CONTENTS, max_size=5))
    def match(self, contents: list[int]) -> None:
        found = []
        by_content = {content: block for block, content in self.contents.items()}
        for content in contents:
            if content not in by_content:
                break
            found.append(by_content[content])
        assert self.pool.match_prefix(map(digest, contents)) == found
        for block in found:
            if block in self.cached:
                self.cached.remove(block)
        if found:
            self.holds.append(found)

    @precondition(lambda self: self.free)
    @rule(pick=PICK, how=st.sampled_from(["free", "unpin", "pin", "ref", "commit"]))
    def misuse(self, pick: int, how: str) -> None:
        block = self.free[pick % len(self.free)]
        with pytest.raises(BlockAccountingError):
            if how == "commit":
                self.pool.commit(block, digest(0))
            else:
                getattr(self.pool, how)([block])

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert (pool.num_free, pool.num_cached) == (len(self.free), len(self.cached))
        assert pool.num_free + pool.num_cached + pool.num_held == self.num_blocks
        for block in range(self.num_blocks):
            assert pool.refs(block) == self.refs(block)
            assert pool.pins(block) == self.pinned(block)
            assert pool.allocatable(block) == (block in self.free or block in self.cached)

    def teardown(self) -> None:
        """Once everything is given back, every block can be had, in the model's order."""
        for blocks in self.holds:
            self.pool.free(blocks)
        for blocks in self.pins:
            self.pool.unpin(blocks)
        assert self.pool.num_allocatable == self.num_blocks
        assert self.pool.allocate(self.num_blocks) == list(range(self.num_blocks))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")),
    stateful_step_count=int(os.environ.get("PROPERTY_STEPS", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
