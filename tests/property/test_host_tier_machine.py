"""The block pool with a host tier under it: whatever is found, in whichever of the two, is what was written.

Bytes are played by a dict for each side, and the copies of a plan by assignments. ``PROPERTY_EXAMPLES``
(default 100) sets how many histories are tried, ``PROPERTY_STEPS`` (default 60) how long they are.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_tier import HostTier
from baton.engine.scheduler import Scheduler, SchedulerLimits

PICK = st.integers(0, 1 << 16)
CONTENTS = st.lists(st.integers(0, 9), max_size=4)


def digest(content: int) -> bytes:
    return bytes([content])


class HostTierMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 7), num_slots=st.integers(1, 7))
    def start(self, num_blocks: int, num_slots: int) -> None:
        self.tier = HostTier(num_slots, BreakEven(4))
        self.pool = BlockPool(num_blocks, 4, self.tier.save)
        self.scheduler = Scheduler(SchedulerLimits(4, 64, 16, 99), self.pool, self.tier)
        self.blocks: list[bytes | None] = [None] * num_blocks
        self.slots: list[bytes | None] = [None] * num_slots
        self.holds: list[list[int]] = []

    @rule(n=st.integers(1, 4), contents=CONTENTS)
    def compute(self, n: int, contents: list[int]) -> None:
        """Somebody takes blocks, has the copies made, writes, and enters some into the index."""
        blocks = self.pool.allocate(n)
        if blocks is None:
            return
        self.holds.append(blocks)
        self.copy()
        for block, content in zip(blocks, contents, strict=False):
            self.blocks[block] = digest(content)
            self.pool.commit(block, digest(content))

    @precondition(lambda self: self.holds)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.pool.free(self.holds.pop(pick % len(self.holds)))

    @rule(chains=st.lists(CONTENTS, min_size=1, max_size=3))
    def match(self, chains: list[list[int]]) -> None:
        """One or several match prefixes under one hold of the lock."""
        found_by: list[tuple[list[int], list[int]]] = []
        for contents in chains:
            chain = list(dict.fromkeys(contents))
            hashes = [digest(content) for content in chain]
            here = [self.pool.find(h) is not None or self.tier.find(h) is not None for h in hashes]
            hit = self.scheduler.cache.find(hashes)
            assert hit.num_blocks == (here.index(False) if False in here else len(here))
            room = hit.num_missing <= self.pool.num_allocatable
            known = [pages is not None for group in hit.groups for pages in group.pages]
            restored = self.scheduler.cache.restore(hit, hashes)
            assert restored.num_blocks == (hit.num_blocks if room else known.index(False))
            blocks = restored.held
            assert len(blocks) == restored.num_blocks
            self.holds.append(blocks)
            found_by.append((chain, blocks))
        self.copy()
        for chain, blocks in found_by:
            assert [self.blocks[block] for block in blocks] == [digest(c) for c in chain[: len(blocks)]]

    def copy(self) -> None:
        plan = self.tier.take_plan()
        for slot, block in plan.saves.items():
            self.slots[slot] = self.blocks[block]
        for block, slot in plan.restores.items():
            self.blocks[block] = self.slots[slot]
        # What has no content for anybody may be anything.
        for block in range(self.pool.num_blocks):
            if self.pool.allocatable(block) and self.pool._digests[block] is None:
                self.blocks[block] = None

    @invariant()
    def agrees(self) -> None:
        tier, pool = self.tier, self.pool
        for content in range(10):
            name = digest(content)
            block, slots = pool.find(name), tier.find(name)
            assert block is None or self.blocks[block] == name
            assert slots is None or [self.slots[slot] for slot in slots] == [name]
        used = [slot for slots in tier._slots.values() for slot in slots]
        assert len(set(used)) == tier.num_used <= tier.num_slots
        assert sorted([*used, *tier._free]) == list(range(tier.num_slots))
        counters = tier.counters
        assert counters.saved - counters.evicted == tier.num_used

    def teardown(self) -> None:
        for blocks in self.holds:
            self.pool.free(blocks)
        assert self.pool.num_held == 0


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "100")),
    stateful_step_count=int(os.environ.get("PROPERTY_STEPS", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
