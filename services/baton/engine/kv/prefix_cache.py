"""The prefix cache of a model's groups: pages of the pool that the index finds, and of the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.prefix_hit import GroupNeeds, longest_hit
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.host_tier import HostTier
from baton.engine.kv.page_counts import PageCounts
from baton_kernels.kv_layout import KVGroup, KVLayout, TokenKV
from baton_kernels.window import ChunkedWindow

Pages = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What the cache has of one group."""

    first: int
    """The first block of it: earlier ones are not needed."""
    pages: list[Pages | None]
    """The pages of each block from there on, a reference taken on each; None: they are to be copied from the
    host tier. Of a state group, the pages of the state behind the last block alone."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a prefix, so that every group can go on behind it."""

    num_blocks: int
    groups: tuple[GroupHit, ...]
    """One for each of the layout's groups."""

    @property
    def held(self) -> list[int]:
        """The pages that a reference was taken on."""
        return [page for group in self.groups for pages in group.pages if pages for page in pages]

    @property
    def num_missing(self) -> int:
        """Blocks that are to be copied from the host tier."""
        return sum(group.pages.count(None) for group in self.groups)


NOTHING = Hit(0, ())


def key_of(digest: bytes, group: int) -> bytes:
    """The name of what a group keeps at a block boundary, whose digest is ``digest``."""
    return digest if group == 0 else digest + bytes((group,))


def group_needs(group: KVGroup) -> GroupNeeds:
    """What a group needs of a prefix to go on behind it."""
    if not isinstance(group.kv, TokenKV) or group.kv.window is None:
        return GroupNeeds(group.kind)
    window = group.kv.window
    if isinstance(window, ChunkedWindow):
        return GroupNeeds("window", window.size, chunked=True)
    return GroupNeeds("window", window)


class PrefixCache:
    """Looks prefixes up in the pool's index and in the host tier. Guarded by the engine's lock, with both."""

    def __init__(self, layout: KVLayout, pool: BlockPool, tier: HostTier | None, counts: PageCounts) -> None:
        self.needs = tuple(group_needs(group) for group in layout.groups)
        self._groups = layout.groups
        self._pool = pool
        self._tier = tier
        self._counts = counts
        self._is_one = len(layout.groups) == 1 and self.needs[0].keeps_all

    def longest(self, hashes: Sequence[bytes]) -> int:
        """The most leading blocks behind which every group can go on, by pool and host tier together."""
        if self._is_one:
            return next((at for at, digest in enumerate(hashes) if not self._has(digest)), len(hashes))
        return longest_hit(
            self.needs,
            self._counts.block_size,
            len(hashes),
            lambda group, block: self._has(key_of(hashes[block], group)),
        )

    def find(self, hashes: Sequence[bytes]) -> Hit:
        """The longest prefix behind which every group can go on, with a reference taken on each of its pages
        in the pool. Blocks of the host tier count if copying them is cheaper than computing."""
        count = self.longest(hashes)
        hit = self._hit(hashes, count)
        if hit.num_missing and self._tier and not self._tier.break_even.copying_pays(hit.num_missing):
            hit = self._hit(hashes, self._in_pool(hashes, count))
        self._pool.ref(hit.held)
        return hit

    def _in_pool(self, hashes: Sequence[bytes], most: int) -> int:
        """The result of :meth:`longest` by the pool alone."""
        find = self._pool.find
        return longest_hit(
            self.needs,
            self._counts.block_size,
            most,
            lambda group, block: find(key_of(hashes[block], group)) is not None,
        )

    def _hit(self, hashes: Sequence[bytes], count: int) -> Hit:
        if not count:
            return NOTHING
        groups: list[GroupHit] = []
        for number, need in enumerate(self.needs):
            first = need.first_block(count, self._counts.block_size)
            pages = [self._pool.pages_of(key_of(digest, number)) for digest in hashes[first:count]]
            groups.append(GroupHit(first, pages))
        return Hit(count, tuple(groups))

    def _has(self, key: bytes) -> bool:
        return self._pool.find(key) is not None or (
            self._tier is not None and self._tier.find(key) is not None
        )

    def drop(self, hit: Hit) -> None:
        """Gives a hit's references back."""
        self._pool.free(hit.held)

    def restore(self, hit: Hit, hashes: Sequence[bytes]) -> Hit:
        """The hit with new pages for what comes from the host tier: these are allocated, and in the index,
        and get their content when the tier's plan is carried out. Without room for them, only as much as the
        pool has alone."""
        if self._tier is None or not hit.num_missing:
            return hit
        missing = self._missing(hit, hashes)
        self._tier.keep(missing)
        if sum(missing.values()) > self._pool.num_allocatable:
            self.drop(hit)
            less = self._hit(hashes, self._in_pool(hashes, hit.num_blocks))
            self._pool.ref(less.held)
            return less
        return Hit(
            hit.num_blocks, tuple(self._restored(hit, number, hashes) for number in range(len(hit.groups)))
        )

    def _missing(self, hit: Hit, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """The keys of what comes from the host tier, and the pages of each."""
        return {
            key_of(hashes[group.first + at], number): len(self._groups[number].tables)
            for number, group in enumerate(hit.groups)
            for at, pages in enumerate(group.pages)
            if pages is None
        }

    def _restored(self, hit: Hit, number: int, hashes: Sequence[bytes]) -> GroupHit:
        assert self._tier is not None
        group, size = hit.groups[number], len(self._groups[number].tables)
        whole: list[Pages | None] = []
        fresh = self._pool.allocate(size * group.pages.count(None)) or []
        for at, pages in enumerate(group.pages):
            if pages is None:
                key = key_of(hashes[group.first + at], number)
                pages, fresh = tuple(fresh[:size]), fresh[size:]
                self._pool.commit_pages(pages, key)
                self._tier.restore(key, pages)
            whole.append(pages)
        return GroupHit(group.first, whole)
