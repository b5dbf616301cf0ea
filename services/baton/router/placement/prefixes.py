"""The parts of a prompt that the workers' prefix caches hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from baton.core.block_hash import chain, short
from baton.core.kv_groups_proto import needs_from_proto
from baton.core.prefix_hit import GroupNeeds
from baton.router.placement.index import PrefixIndex
from baton.v1 import worker_pb2 as pb

ASK_AGAIN = 32
"""Messages after which a snapshot that has not come is asked for again; the worker may have sent earlier ones
before it was asked."""


class CacheShape(NamedTuple):
    """How a worker's prefix cache is asked."""

    block_size: int
    needs: tuple[GroupNeeds, ...]
    """What a hit needs of each group."""
    kv_dtype: str = ""
    """What blocks hold, which their digests tell."""

    @property
    def is_plain(self) -> bool:
        """Whether all leading blocks that a cache has are a hit."""
        return len(self.needs) == 1 and self.needs[0].keeps_all


@dataclass(slots=True)
class _Account:
    """The state of the block events of one worker's stream."""

    number: int
    """The worker's number in the index."""
    shape: CacheShape
    longest_shared_prompt: int
    next: int | None = None
    """Number of the next event. None: a snapshot has to come first."""
    left: int = 0
    """Messages of the snapshot that are still to come."""
    unusable: int = 0
    """Messages that came since an event was missed."""
    fresh: bool = True
    """Whether no event has come yet."""
    blocks: Counter[int] = field(default_factory=Counter)
    """The blocks in the index, by KV group."""

    def is_continued_by(self, events: pb.BlockEvents) -> bool:
        """Whether these events are the next ones. Parts of a snapshot tell no event."""
        if events.first != self.next:
            return False
        if self.left:
            return events.left == self.left - 1 and events.end == events.first
        return not events.left


class Prefixes:
    """Keeps the index up to date with the block events of the workers' streams."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex()
        self._accounts: dict[str, _Account] = {}
        self._names: dict[int, str] = {}
        self._alike: dict[CacheShape, int] = {}
        """The workers of each shape, as bits."""

    def joined(self, worker: str, hello: pb.WorkerHello) -> None:
        """Add a worker whose stream has begun."""
        self.left(worker)
        if hello.tells_blocks and hello.block_size:
            number = self.index.add_worker()
            shape = CacheShape(hello.block_size, needs_from_proto(hello.kv_groups), hello.kv_cache_dtype)
            account = _Account(number, shape, hello.longest_shared_prompt)
            self._accounts[worker] = account
            self._names[number] = worker
            self._count(account.shape, number)

    def left(self, worker: str) -> None:
        """Forget a worker whose stream has ended. If it lives on, it tells of its blocks again."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._discount(account)

    def told(self, worker: str, events: pb.BlockEvents) -> bool:
        """Take in block events. False: an event was missed, and a snapshot is wanted. The index keeps what it
        has of the worker until the snapshot comes, as most of it will still be true."""
        account = self._accounts.get(worker)
        if account is None:
            return True
        if events.restart:
            self._restart(worker, account)
        elif not account.is_continued_by(events):
            account.next = None
            account.unusable += 1
            return account.unusable % ASK_AGAIN != 1
        account.next, account.left, account.unusable = events.end, events.left, 0
        self._take(account, 0, events.stored, events.removed)
        for more in events.more:
            self._take(account, more.group, more.stored, more.removed)
        return True

    def _take(self, account: _Account, group: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        account.blocks[group] += self.index.store(account.number, stored, group)
        account.blocks[group] -= self.index.remove(account.number, removed, group)

    def findable(self, worker: str) -> tuple[int, ...]:
        """Return the number of blocks of ``worker`` in the index, for each of its KV groups; empty for one
        that tells of none."""
        account = self._accounts.get(worker)
        if account is None:
            return ()
        return tuple(account.blocks[group] for group in range(len(account.shape.needs)))

    def cached(self, token_ids: Sequence[int], salt: bytes = b"") -> dict[str, int]:
        """Return worker → leading tokens that need not be computed there. The last token always must be."""
        found: dict[str, int] = {}
        for shape, among in self._alike.items():
            size = shape.block_size
            named = chain(token_ids, size, salt, kv_dtype=shape.kv_dtype)
            digests = map(short, islice(named, (len(token_ids) - 1) // size))
            if shape.is_plain:
                hits = self.index.leading(digests, among)
            else:
                hits = self.index.going_on(digests, shape.needs, size, among)
            for number, blocks in hits.items():
                worker = self._names[number]
                longest = self._accounts[worker].longest_shared_prompt
                if not longest or len(token_ids) <= longest:
                    found[worker] = blocks * size
        return found

    def _restart(self, worker: str, account: _Account) -> None:
        """Give a worker that starts over a new number; the index sweeps the blocks of the old one away."""
        if account.fresh:
            account.fresh = False
            return
        self._discount(account)
        account.blocks.clear()
        account.number = self.index.add_worker()
        self._names[account.number] = worker
        self._count(account.shape, account.number)

    def _count(self, shape: CacheShape, number: int) -> None:
        self._alike[shape] = self._alike.get(shape, 0) | 1 << number

    def _discount(self, account: _Account) -> None:
        self.index.remove_worker(account.number)
        del self._names[account.number]
        left = self._alike[account.shape] & ~(1 << account.number)
        if left:
            self._alike[account.shape] = left
        else:
            del self._alike[account.shape]
