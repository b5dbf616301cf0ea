"""What a worker tells of its prefix cache, and how far a router believes it."""

from __future__ import annotations

import asyncio

from baton.core.block_hash import chain, hash_blocks, short
from baton.core.kv_groups_proto import needs_to_proto
from baton.core.prefix_hit import GroupNeeds
from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import Sequence
from baton.router.placement.prefixes import Prefixes
from baton.v1 import worker_pb2 as pb
from baton.worker import block_feed
from baton.worker.block_feed import BlockFeed
from tests.support.fake_engine import fake_engine, run
from tests.support.local_worker import LocalWorker, answer, local_ring, until

HELLO = pb.WorkerHello(tells_blocks=True, block_size=4)
GROUPS = [GroupNeeds("full"), GroupNeeds("window", 6), GroupNeeds("state")]
GROUPED = pb.WorkerHello(tells_blocks=True, block_size=4, kv_groups=map(needs_to_proto, GROUPS))
PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40, 5, 6, 1]


def shorts(token_ids: list[int], block_size: int = 4, salt: bytes = b"") -> list[int]:
    return [short(digest) for digest in hash_blocks(token_ids, block_size, salt)]


def told(prefixes: Prefixes, worker: str, blocks: list[int], hello: pb.WorkerHello = HELLO) -> None:
    prefixes.joined(worker, hello)
    assert prefixes.told(worker, pb.BlockEvents(restart=True, stored=blocks))


def test_a_chain_is_made_as_far_as_it_is_asked_for_whatever_its_pieces() -> None:
    token_ids = list(range(1000))
    assert list(chain(token_ids, 2)) == hash_blocks(token_ids, 2)
    assert len(hash_blocks(token_ids, 2)) == 500
    assert next(chain(token_ids, 2)) == hash_blocks(token_ids[:2], 2)[0]
    assert (
        hash_blocks(token_ids, 2, start=300, parent=hash_blocks(token_ids[:300], 2)[-1])[-1]
        == (hash_blocks(token_ids, 2)[-1])
    )


class TestRouter:
    def test_leading_blocks_count_and_the_last_token_is_always_computed(self) -> None:
        prefixes = Prefixes()
        blocks = shorts(PROMPT[:12])
        told(prefixes, "all", blocks)
        told(prefixes, "one", blocks[:1])
        told(prefixes, "not the first", blocks[1:])
        assert prefixes.cached(PROMPT) == {"all": 12, "one": 4}
        assert prefixes.cached(PROMPT[:12]) == {"all": 8, "one": 4}
        assert prefixes.cached(PROMPT[:4]) == {}
        assert prefixes.cached(PROMPT, salt=b"tenant") == {}

    def test_each_worker_is_asked_by_its_own_block_size(self) -> None:
        prefixes = Prefixes()
        told(prefixes, "four", shorts(PROMPT))
        told(prefixes, "six", shorts(PROMPT, 6), pb.WorkerHello(tells_blocks=True, block_size=6))
        assert prefixes.cached(PROMPT) == {"four": 12, "six": 12}
        assert prefixes.cached(PROMPT[:8]) == {"four": 4, "six": 6}

    def test_each_worker_is_asked_by_what_its_blocks_hold(self) -> None:
        prefixes = Prefixes()
        hello = pb.WorkerHello(tells_blocks=True, block_size=4, kv_cache_dtype="fp8")
        named = [short(digest) for digest in hash_blocks(PROMPT, 4, kv_dtype="fp8")]
        told(prefixes, "fp8", named[:2], hello)
        told(prefixes, "auto", shorts(PROMPT))
        told(prefixes, "fp8 by other names", shorts(PROMPT), hello)
        assert prefixes.cached(PROMPT) == {"fp8": 8, "auto": 12}

    def test_prompts_that_a_worker_does_not_share_are_not_found_there(self) -> None:
        prefixes = Prefixes()
        hello = pb.WorkerHello(tells_blocks=True, block_size=4, longest_shared_prompt=9)
        told(prefixes, "w", shorts(PROMPT), hello)
        assert prefixes.cached(PROMPT[:9]) == {"w": 8}
        assert prefixes.cached(PROMPT) == {}

    def test_what_leaves_is_no_longer_there(self) -> None:
        prefixes = Prefixes()
        blocks = shorts(PROMPT)
        told(prefixes, "w", blocks)
        assert prefixes.told("w", pb.BlockEvents(first=0, end=1, removed=blocks[1:2]))
        assert prefixes.cached(PROMPT) == {"w": 4}
        prefixes.left("w")
        assert prefixes.cached(PROMPT) == {}
        told(prefixes, "w", [])
        assert prefixes.cached(PROMPT) == {}, "a new stream begins with nothing"

    def test_a_gap_is_noticed_and_mended_by_a_snapshot(self) -> None:
        prefixes = Prefixes()
        blocks = shorts(PROMPT)
        told(prefixes, "w", blocks[:1])
        assert not prefixes.told("w", pb.BlockEvents(first=5, end=6, stored=blocks[1:2]))
        assert prefixes.told("w", pb.BlockEvents(first=6, end=7, stored=blocks[1:2])), "it was said once"
        assert prefixes.cached(PROMPT) == {"w": 4}
        assert prefixes.told("w", pb.BlockEvents(first=7, end=7, restart=True, stored=blocks[1:], left=1))
        assert prefixes.told("w", pb.BlockEvents(first=7, end=7, stored=blocks[:1])), "its second part"
        assert prefixes.cached(PROMPT) == {"w": 12}
        assert prefixes.told("w", pb.BlockEvents(first=7, end=8, removed=blocks[2:]))
        assert prefixes.cached(PROMPT) == {"w": 8}

    def test_a_part_of_a_snapshot_that_is_missing_is_noticed(self) -> None:
        prefixes = Prefixes()
        prefixes.joined("w", HELLO)
        assert prefixes.told("w", pb.BlockEvents(restart=True, left=2))
        assert not prefixes.told("w", pb.BlockEvents(left=0))
        prefixes.joined("w", HELLO)
        assert not prefixes.told("w", pb.BlockEvents(left=1)), "its beginning"

    def test_the_last_part_of_a_snapshot_is_missed_by_the_next_event(self) -> None:
        prefixes = Prefixes()
        prefixes.joined("w", HELLO)
        assert prefixes.told("w", pb.BlockEvents(first=3, end=3, restart=True, left=1))
        assert not prefixes.told("w", pb.BlockEvents(first=3, end=4, removed=[8]))


class TestGroups:
    """A worker with a full group, a window of 6 tokens and a state, in blocks of 4: behind n blocks it needs
    all of them, the last two of the window's, and the state's at the last."""

    def joined(self, worker: str, *groups: list[int]) -> Prefixes:
        """Return a router's account of a worker with these blocks of each group."""
        prefixes = Prefixes()
        prefixes.joined(worker, GROUPED)
        more = [pb.GroupEvents(group=group, stored=blocks) for group, blocks in enumerate(groups[1:], 1)]
        assert prefixes.told(worker, pb.BlockEvents(restart=True, stored=groups[0], more=more))
        return prefixes

    def test_a_worker_is_as_good_as_it_can_go_on(self) -> None:
        blocks = shorts(PROMPT)
        assert self.joined("w", blocks, blocks, blocks).cached(PROMPT) == {"w": 12}
        assert self.joined("w", blocks, blocks[1:], blocks[2:]).cached(PROMPT) == {"w": 12}
        assert self.joined("w", blocks, blocks, blocks[1:2]).cached(PROMPT) == {"w": 8}, "the last snapshot"
        assert self.joined("w", blocks, blocks[:2], blocks).cached(PROMPT) == {"w": 8}, "the window's end"
        assert self.joined("w", blocks[:1], blocks, blocks).cached(PROMPT) == {"w": 4}
        assert self.joined("w", blocks, blocks[2:], blocks).cached(PROMPT) == {}, "the window has a gap"
        assert self.joined("w", blocks, blocks, []).cached(PROMPT) == {}, "all is there but a state"

    def test_one_groups_block_is_not_anothers(self) -> None:
        blocks = shorts(PROMPT)
        prefixes = self.joined("w", blocks, blocks, blocks)
        gone = pb.GroupEvents(group=2, removed=blocks[2:])
        assert prefixes.told("w", pb.BlockEvents(first=0, end=1, more=[gone]))
        assert prefixes.cached(PROMPT) == {"w": 8}
        back = pb.GroupEvents(group=2, stored=blocks[2:])
        assert prefixes.told("w", pb.BlockEvents(first=1, end=2, more=[back]))
        assert prefixes.cached(PROMPT) == {"w": 12}
        assert prefixes.told("w", pb.BlockEvents(first=2, end=3, removed=blocks[:1]))
        assert prefixes.cached(PROMPT) == {}
        assert not prefixes.told("w", pb.BlockEvents(first=4, end=5, more=[gone])), "a gap in the numbers"

    def test_workers_are_asked_by_what_their_own_layers_keep(self) -> None:
        blocks = shorts(PROMPT)
        prefixes = self.joined("grouped", blocks, blocks, blocks[:1])
        told(prefixes, "plain", blocks)
        latent = pb.WorkerHello(
            tells_blocks=True, block_size=4, kv_groups=[needs_to_proto(GroupNeeds("latent"))]
        )
        told(prefixes, "latent", blocks[:2], latent)
        assert prefixes.cached(PROMPT) == {"grouped": 4, "plain": 12, "latent": 8}
        prefixes.left("grouped")
        assert prefixes.cached(PROMPT) == {"plain": 12, "latent": 8}
        for _ in range(4):
            prefixes.index.sweep(100)
        assert len(prefixes.index) == 3, "nothing stays of the groups of one that left"

    def test_the_feed_tells_each_entry_by_its_group(self) -> None:
        engine = fake_engine()
        feed = BlockFeed(engine, most=4)
        digests = hash_blocks(PROMPT, 4)
        keys = [*digests, *(digest + b"\1" for digest in digests[1:]), digests[2] + b"\2"]
        for block, key in zip(engine.pool.allocate(len(keys)) or [], keys, strict=True):
            engine.pool.commit(block, key)
        prefixes = Prefixes()
        prefixes.joined("w", GROUPED)
        sizes = []
        while feed.behind:
            events = feed.take()
            assert events is not None and prefixes.told("w", events)
            sizes.append([len(events.stored), *((more.group, len(more.stored)) for more in events.more)])
        assert sizes == [[3, (1, 1)], [0, (1, 1), (2, 1)]]
        assert prefixes.cached(PROMPT) == {"w": 12}
        engine.pool.journal.removed(keys[-1])
        engine.pool.journal.removed(keys[0])
        events = feed.take()
        assert events == pb.BlockEvents(
            first=6,
            end=8,
            removed=[short(digests[0])],
            more=[pb.GroupEvents(group=2, removed=[short(digests[2])])],
        )


class TestFeed:
    def test_a_long_account_is_told_in_parts(self) -> None:
        engine = fake_engine()
        prompt = [i % 50 for i in range(40)]
        run(engine, Sequence("r", 0, prompt, ResolvedSampling(max_tokens=1)))
        feed, prefixes = BlockFeed(engine, most=3), Prefixes()
        prefixes.joined("w", HELLO)
        parts = []
        while feed.behind:
            events = feed.take()
            assert events is not None
            assert prefixes.told("w", events)
            parts.append(len(events.stored))
        assert parts == [3, 3, 3, 1]
        assert prefixes.cached([*prompt, 1]) == {"w": 40}
        assert feed.take() is None

    def test_one_that_is_too_far_behind_is_told_all_again(self) -> None:
        engine = fake_engine()
        feed = BlockFeed(engine)
        assert feed.take() == pb.BlockEvents(restart=True)
        journal = engine.pool.journal
        for number in range(journal._events.maxlen or 0):
            journal.stored(number.to_bytes(32, "little"))
        events = feed.take()
        assert events is not None and not events.restart and events.end == block_feed.MAX_HASHES
        for number in range(block_feed.MAX_HASHES + 1):
            journal.removed(number.to_bytes(32, "little"))
        events = feed.take()
        assert events is not None and events.restart and events.end == journal.end


async def test_a_second_turn_goes_where_the_first_one_is() -> None:
    """To the prefill worker that computed it, and to the decode worker that has its answer: where computing
    and sending it again would take longer than the tick by which places are compared."""
    prefills = [LocalWorker("prefill", step_s=0.02, kv_bytes_per_token=10**7) for _ in range(3)]
    decodes = [LocalWorker("decode", step_s=0.002, kv_bytes_per_token=10**7) for _ in range(3)]
    async with local_ring([*prefills, *decodes]) as ring:
        prompt = PROMPT * 3
        first = await answer(ring, "first", prompt, 12)
        held = [w for w in (*prefills, *decodes) if w.engine.stats().blocks.cached]
        assert len(held) == 2
        placer = ring.fleet.placer
        await until(lambda: len(placer._prefixes.cached([*prompt, *first])) == 2)
        for worker in (*prefills, *decodes):
            if worker not in held:  # so that nothing else speaks for those who have it
                assert not worker.engine.stats().scheduler.prefix_queried_tokens
        second = [*prompt, *first, 1, 2, 3]
        await asyncio.gather(*(answer(ring, f"second-{n}", second, 4) for n in range(2)))
        for worker in (*prefills, *decodes):
            if worker not in held:
                assert not worker.engine.stats().blocks.cached, "nobody else was asked"
        [prefill] = [w for w in held if w in prefills]
        assert prefill.engine.stats().scheduler.prefix_hit_tokens >= 36


async def test_a_router_that_missed_something_gets_a_snapshot() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]) as ring:
        await answer(ring, "r", PROMPT, 4)
        prefixes = ring.fleet.placer._prefixes
        await until(lambda: prefixes.cached(PROMPT))
        account = prefixes._accounts[worker.address]
        assert account.next is not None
        account.next -= 1
        prefixes.index.remove(account.number, shorts(PROMPT))
        assert prefixes.cached(PROMPT) == {}
        await answer(ring, "another", [90, *PROMPT], 4)
        await until(lambda: prefixes.cached(PROMPT) == {worker.address: 12})


async def test_a_worker_without_a_prefix_cache_tells_nothing() -> None:
    def make(**known: object) -> object:
        return fake_engine(prefix_caching=False, **known)  # type: ignore[arg-type]

    worker = LocalWorker("both", make_engine=make)  # type: ignore[arg-type]
    async with local_ring([worker]) as ring:
        await answer(ring, "r", PROMPT, 4)
        assert ring.fleet.placer._prefixes.cached(PROMPT) == {}
        assert not ring.fleet.placer._prefixes._accounts
