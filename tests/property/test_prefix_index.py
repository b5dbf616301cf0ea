"""The router's index of who holds which block against a dict of sets, and the account that a worker gives of
its prefix cache against its pool."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.block_hash import short
from baton.core.kv_groups_proto import needs_to_proto
from baton.core.prefix_hit import GroupNeeds, longest_hit
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
        new = self.index.store(worker, blocks)
        self.lost = self.lost or self.index.dropped_blocks > before
        assert self.lost or new == len(set(blocks) - self.held[worker])
        self.held[worker].update(blocks)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, blocks=BLOCKS)
    def remove(self, pick: int, blocks: list[int]) -> None:
        worker = sorted(self.held)[pick % len(self.held)]
        gone = self.index.remove(worker, blocks)
        assert self.lost or gone == len(set(blocks) & self.held[worker])
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


WINDOWS = st.builds(GroupNeeds, st.just("window"), st.integers(1, 24), st.booleans())
NEEDS = st.lists(
    st.one_of(st.builds(GroupNeeds, st.sampled_from(["full", "latent", "state"])), WINDOWS), max_size=4
)


def is_held(own: list[set[int]], group: int, at: int) -> bool:
    return at in own[group]


@settings(max_examples=SETTINGS.max_examples * 4, deadline=None)
@given(st.data(), NEEDS, st.integers(1, 8), st.integers(0, 12), st.integers(1, 5))
def test_the_index_knows_how_far_each_worker_can_go_on(
    data: st.DataObject, needs: list[GroupNeeds], block_size: int, num_blocks: int, workers: int
) -> None:
    """``held``: worker → group → its blocks of the prompt. Most are there, or no hit would be long."""
    index = PrefixIndex()
    chain = data.draw(
        st.lists(st.integers(0, 2**64 - 1), min_size=num_blocks, max_size=num_blocks, unique=True)
    )
    held: dict[int, list[set[int]]] = {}
    for _ in range(workers):
        worker = index.add_worker()
        held[worker] = []
        for group in range(len(needs)):
            lacks = data.draw(st.sets(st.integers(0, 12), max_size=4))
            index.store(worker, chain, group)
            index.remove(worker, [block for at, block in enumerate(chain) if at in lacks], group)
            held[worker].append(set(range(num_blocks)) - lacks)
    among = data.draw(st.none() | st.integers(0, 2**workers - 1))
    hits: dict[int, int] = {}
    for worker, own in held.items():
        if among is None or among >> worker & 1:
            hits[worker] = longest_hit(needs, block_size, num_blocks, partial(is_held, own))
    found = index.going_on(chain, needs, block_size, among)
    assert found == {worker: count for worker, count in hits.items() if count}
    if len(needs) == 1 and needs[0].keeps_all:
        assert index.leading(chain, among) == found


GROUPS = (GroupNeeds("full"), GroupNeeds("window", 5), GroupNeeds("state"))


def digest(content: int) -> bytes:
    return bytes([content + 1]) * 32


def key(content: int, group: int) -> bytes:
    return digest(content) + (bytes([group]) if group else b"")


class AccountMachine(RuleBasedStateMachine):
    """A worker's pool, its feed, and a router that may miss messages. What its groups keep of a block comes
    and goes apart."""

    @initialize(num_blocks=st.integers(1, 9), most=st.sampled_from([1, 2, 4096]))
    def start(self, num_blocks: int, most: int) -> None:
        self.most = most
        self.engine = fake_engine(num_blocks)
        self.pool: BlockPool = self.engine.pool
        self.feed = BlockFeed(self.engine, most)
        self.router = Prefixes()
        groups = map(needs_to_proto, GROUPS)
        self.router.joined("w", pb.WorkerHello(tells_blocks=True, block_size=4, kv_groups=groups))
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
    @rule(pick=PICK, content=st.integers(0, 5), group=st.integers(0, 2))
    def commit(self, pick: int, content: int, group: int) -> None:
        block = self.holds[pick % len(self.holds)][0]
        others = {key(c, g) for c in range(6) for g in range(3)} - {key(content, group)}
        if not any(self.pool.find(other) == block for other in others):
            self.pool.commit(block, key(content, group))

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
            each: list[pb.BlockEvents | pb.GroupEvents] = [events, *events.more]
            assert sum(len(of_group.stored) + len(of_group.removed) for of_group in each) <= self.most
            assert not any(set(of_group.stored) & set(of_group.removed) for of_group in each)
            assert all(more.stored or more.removed for more in events.more)
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
        names = [(content, group) for content in range(10) for group in range(3)]
        known = {name for name in names if self.router_knows(*name)}
        assert known == {name for name in names if self.pool.find(key(*name)) is not None}
        by_group = [sum(group == each for _, each in known) for group in range(len(GROUPS))]
        assert self.router.findable("w") == tuple(by_group)
        assert not self.feed.behind

    def router_knows(self, content: int, group: int) -> bool:
        """Whether the index has the entry: a block is a hit for a model whose other groups need nothing."""
        needs = [GroupNeeds("full") if n == group else GroupNeeds("window", 1) for n in range(3)]
        return bool(self.router.index.going_on([short(digest(content))], needs, 4))


TestAccount = pytest.mark.deep(AccountMachine.TestCase)
TestAccount.settings = SETTINGS
