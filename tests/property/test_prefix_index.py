"""The router's index of who holds which block against a dict of sets, and the account that a worker gives of
its prefix cache against its pool."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.block_hash import short
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.prefix_journal import MAX_KEPT
from baton.router.placement.index import PrefixIndex
from baton.router.placement.prefixes import ASK_AGAIN, Prefixes
from baton.v1 import worker_pb2 as pb
from baton.worker.block_feed import BlockFeed
from tests.support.fake_engine import fake_engine

PICK = st.integers(0, 1 << 16)
BLOCKS = st.lists(st.integers(0, 12), max_size=8)
SETTINGS = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")),
    stateful_step_count=int(os.environ.get("PROPERTY_STEPS", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class IndexMachine(RuleBasedStateMachine):
    """``held``: worker → its blocks."""

    @initialize(most=st.sampled_from([4, 100]))
    def start(self, most: int) -> None:
        self.index = PrefixIndex(most)
        self.most = most
        self.held: dict[int, set[int]] = {}
        self.lost = False
        """The index was full once, and may know of less than is held."""

    @rule()
    def add_worker(self) -> None:
        worker = self.index.add_worker()
        assert worker not in self.held
        self.held[worker] = set()

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def remove_worker(self, pick: int) -> None:
        worker = sorted(self.held)[pick % len(self.held)]
        del self.held[worker]
        self.index.remove_worker(worker)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, blocks=BLOCKS)
    def store(self, pick: int, blocks: list[int]) -> None:
        worker = sorted(self.held)[pick % len(self.held)]
        before = self.index.dropped_blocks
        self.index.store(worker, blocks)
        self.lost = self.lost or self.index.dropped_blocks > before
        self.held[worker].update(blocks)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, blocks=BLOCKS)
    def remove(self, pick: int, blocks: list[int]) -> None:
        worker = sorted(self.held)[pick % len(self.held)]
        self.index.remove(worker, blocks)
        self.held[worker].difference_update(blocks)

    @rule(most=st.integers(1, 20))
    def sweep(self, most: int) -> None:
        self.index.sweep(most)

    @rule(chain=st.lists(st.integers(0, 12), unique=True, max_size=8), among=st.none() | st.integers(0, 255))
    def ask(self, chain: list[int], among: int | None) -> None:
        expected = {}
        for worker, blocks in self.held.items():
            count = next((i for i, block in enumerate(chain) if block not in blocks), len(chain))
            if count and (among is None or among >> worker & 1):
                expected[worker] = count
        found = self.index.leading(chain, among)
        if self.lost:
            assert all(count <= expected.get(worker, 0) for worker, count in found.items())
        else:
            assert found == expected

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.index) <= self.most

    def teardown(self) -> None:
        """Of workers that are gone nothing stays, and their numbers are given out again."""
        if not hasattr(self, "index"):
            return
        for worker in self.held:
            self.index.remove_worker(worker)
        for _ in range(60):
            self.index.sweep(20)
        assert len(self.index) == 0
        assert self.index.add_worker() == 0


TestIndex = IndexMachine.TestCase
TestIndex.settings = SETTINGS


def digest(content: int) -> bytes:
    return bytes([content + 1]) * 32


class AccountMachine(RuleBasedStateMachine):
    """A worker's pool, its feed, and a router that may miss messages."""

    @initialize(num_blocks=st.integers(1, 9), most=st.sampled_from([1, 2, 4096]))
    def start(self, num_blocks: int, most: int) -> None:
        self.most = most
        self.engine = fake_engine(num_blocks)
        self.pool: BlockPool = self.engine.pool
        self.feed = BlockFeed(self.engine, most)
        self.router = Prefixes()
        self.router.joined("w", pb.WorkerHello(tells_blocks=True, block_size=4))
        self.holds: list[list[int]] = []

    @rule(n=st.integers(1, 3))
    def allocate(self, n: int) -> None:
        blocks = self.pool.allocate(n)
        if blocks is not None:
            self.holds.append(blocks)

    @precondition(lambda self: self.holds)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.pool.free(self.holds.pop(pick % len(self.holds)))

    @precondition(lambda self: self.holds)
    @rule(pick=PICK, content=st.integers(0, 5))
    def commit(self, pick: int, content: int) -> None:
        block = self.holds[pick % len(self.holds)][0]
        if not any(self.pool.find(digest(other)) == block for other in range(6) if other != content):
            self.pool.commit(block, digest(content))

    @rule(heard=st.booleans())
    def tell(self, heard: bool) -> None:
        events = self.take()
        if events is not None and heard and not self.router.told("w", events):
            self.feed.restart()

    @rule()
    def fall_behind(self) -> None:
        journal = self.pool.journal
        for _ in range(MAX_KEPT // 2 + 1 if self.most > 2 else 3):
            journal.stored(digest(9))
            journal.removed(digest(9))

    def take(self) -> pb.BlockEvents | None:
        events = self.feed.take()
        if events is not None:
            assert len(events.stored) + len(events.removed) <= self.most
            assert not set(events.stored) & set(events.removed)
        return events

    def tell_all(self) -> None:
        while (events := self.take()) is not None:
            if not self.router.told("w", events):
                self.feed.restart()

    def teardown(self) -> None:
        """With nothing lost any more, the router comes to know what the pool has. That a message was lost it
        hears with the next one."""
        if not hasattr(self, "feed"):
            return
        self.tell_all()
        for blocks in self.holds:
            self.pool.free(blocks)
        last = self.pool.allocate(1)
        assert last is not None
        self.pool.commit(last[0], digest(7))
        for _ in range(ASK_AGAIN):
            self.pool.journal.removed(digest(8))
            self.tell_all()
        index = self.router.index
        known = {content for content in range(10) if index.leading([short(digest(content))])}
        assert known == {content for content in range(10) if self.pool.find(digest(content)) is not None}
        assert not self.feed.behind


TestAccount = AccountMachine.TestCase
TestAccount.settings = SETTINGS
