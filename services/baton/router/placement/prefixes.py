"""The parts of a prompt that the workers' prefix caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from baton.core.block_hash import chain, short
from baton.router.placement.index import PrefixIndex
from baton.v1 import worker_pb2 as pb

ASK_AGAIN = 32
"""Messages after which a snapshot that has not come is asked for again; the worker may have sent earlier ones
before it was asked."""


@dataclass(slots=True)
class _Account:
    """The state of the block events of one worker's stream."""

    number: int
    """The worker's number in the index."""
    block_size: int
    longest_shared_prompt: int
    next: int | None = None
    """Number of the next event. None: a snapshot has to come first."""
    left: int = 0
    """Messages of the snapshot that are still to come."""
    unusable: int = 0
    """Messages that came since an event was missed."""
    fresh: bool = True
    """Whether no event has come yet."""

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
        self._by_block_size: dict[int, int] = {}
        """Block size → the workers with it, as bits."""

    def joined(self, worker: str, hello: pb.WorkerHello) -> None:
        """Add a worker whose stream has begun."""
        self.left(worker)
        if hello.tells_blocks and hello.block_size:
            number = self.index.add_worker()
            account = _Account(number, hello.block_size, hello.longest_shared_prompt)
            self._accounts[worker] = account
            self._names[number] = worker
            self._count(account.block_size, number)

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
        self.index.store(account.number, events.stored)
        self.index.remove(account.number, events.removed)
        return True

    def cached(self, token_ids: Sequence[int], salt: bytes = b"") -> dict[str, int]:
        """Return worker → leading tokens that need not be computed there. The last token always must be."""
        found: dict[str, int] = {}
        for block_size, among in self._by_block_size.items():
            digests = islice(chain(token_ids, block_size, salt), (len(token_ids) - 1) // block_size)
            for number, blocks in self.index.leading(map(short, digests), among).items():
                worker = self._names[number]
                longest = self._accounts[worker].longest_shared_prompt
                if not longest or len(token_ids) <= longest:
                    found[worker] = blocks * block_size
        return found

    def _restart(self, worker: str, account: _Account) -> None:
        """Give a worker that starts over a new number; the index sweeps the blocks of the old one away."""
        if account.fresh:
            account.fresh = False
            return
        self._discount(account)
        account.number = self.index.add_worker()
        self._names[account.number] = worker
        self._count(account.block_size, account.number)

    def _count(self, block_size: int, number: int) -> None:
        self._by_block_size[block_size] = self._by_block_size.get(block_size, 0) | 1 << number

    def _discount(self, account: _Account) -> None:
        self.index.remove_worker(account.number)
        del self._names[account.number]
        left = self._by_block_size[account.block_size] & ~(1 << account.number)
        if left:
            self._by_block_size[account.block_size] = left
        else:
            del self._by_block_size[account.block_size]
