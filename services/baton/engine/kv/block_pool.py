"""The owners of each page of KV, the order in which pages are given away, and the prefix index.

In most models a page is a KV block; in others a block lies in several pages (``KVLayout``). A page has one
content and two lifetimes: sequences *reference* it, and transfers *pin* it. It is allocatable only when it
has neither. Allocatable pages stand in one list, in the order in which they will be given away: first pages
whose content cannot be found, the latest freed first (which keeps ids adjacent), then pages of the prefix
index, the least recently used first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.engine.kv.prefix_journal import PrefixJournal


class BlockAccountingError(RuntimeError):
    """A block was given back twice, taken while in use, or used without being held: a bug in the caller."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool's blocks at one moment; each is in one of these states."""

    free: int
    """Allocatable blocks without findable content."""
    cached: int
    """Allocatable blocks that the prefix index can still find."""
    held: int
    """Blocks with a reference or a pin."""

    @property
    def usage(self) -> float:
        """The share of blocks that are held, 0 to 1."""
        blocks = self.free + self.cached + self.held
        return self.held / blocks if blocks else 0.0


class BlockPool:
    """Reference counts, pins, the list of allocatable blocks and the prefix index of ``num_blocks`` blocks,
    or pages.

    Knows ids only; the bytes are elsewhere. Every operation is O(1) per block. Not locked: the engine's lock
    guards it. Raises :class:`BlockAccountingError` on misuse.

    The index finds what lies in several pages by one digest. As soon as one of them is given away it finds
    none of them any more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        on_evict: Callable[[tuple[int, ...], bytes], None] | None = None,
        kv_dtype: str = "",
    ) -> None:
        """``kv_dtype``: what blocks hold in place of numbers of the model's type, which their digests tell.
        ``on_evict`` hears of blocks that are given away though the index could find them, and under which
        digest: their content is lost when the new owner writes to them."""
        self.num_blocks = num_blocks
        self.journal = PrefixJournal()
        self._on_evict = on_evict
        self.block_size = block_size
        self.kv_dtype = kv_dtype
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._rest: dict[int, tuple[int, ...]] = {}
        """All pages of what lies in several, by the first."""
        # A circular doubly linked list threaded through two arrays; node ``num_blocks`` is its two ends.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks
        self._num_cached = 0

    # -- counts ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Allocatable blocks without findable content."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Allocatable blocks that the prefix index can still find."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks with a reference or a pin."""
        return self.num_blocks - self._num_free - self._num_cached

    @property
    def num_allocatable(self) -> int:
        return self._num_free + self._num_cached

    def stats(self) -> PoolStats:
        return PoolStats(self._num_free, self._num_cached, self.num_held)

    def refs(self, block: int) -> int:
        """The number of references on a block; above 1 its content is shared and must not be written."""
        return self._refs[block]

    def pins(self, block: int) -> int:
        return self._pins[block]

    def allocatable(self, block: int) -> bool:
        return self._refs[block] == 0 and self._pins[block] == 0

    # -- references --------------------------------------------------------------------------------------

    def allocate(self, n: int, after: int | None = None) -> list[int] | None:
        """Takes ``n`` blocks, one reference each, in ascending order; None, and no change, if fewer are
        allocatable. Their content is undefined.

        Prefers the block that follows ``after`` and then each block's successor, when these cost no cached
        content: adjacent blocks travel as one message.
        """
        if n > self.num_allocatable:
            return None
        blocks = []
        for _ in range(n):
            block = self._next[self.num_blocks]
            if after is not None and self._is_free(after + 1):
                block = after + 1
            self._take(block)
            self._forget(block)
            blocks.append(block)
            after = block
        blocks.sort()
        return blocks

    def ref(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are held or cached."""
        for block in blocks:
            if self.allocatable(block):
                if self._digests[block] is None:
                    raise BlockAccountingError(f"block {block} is free: it has no content to refer to")
                self._take(block)
            else:
                self._refs[block] += 1

    def free(self, blocks: Sequence[int] | array[int]) -> None:
        """Drops one reference of each block, the last first: the cache then gives up the end of a sequence
        before its beginning."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise BlockAccountingError(f"block {block} was freed without a reference")
            self._refs[block] -= 1
            self._give_back(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keeps held blocks from being allocated, whatever happens to their references."""
        for block in blocks:
            if self.allocatable(block):
                raise BlockAccountingError(f"block {block} was pinned by someone who does not hold it")
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[int] | array[int]) -> None:
        for block in reversed(blocks):
            if self._pins[block] == 0:
                raise BlockAccountingError(f"block {block} was unpinned without a pin")
            self._pins[block] -= 1
            self._give_back(block)

    # -- prefix index ------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> int | None:
        """The block that the index has for a digest, or None."""
        return self._index.get(digest)

    def pages_of(self, digest: bytes) -> tuple[int, ...] | None:
        """The pages that the index has for a digest, or None."""
        first = self._index.get(digest)
        return None if first is None else self._rest.get(first, (first,))

    def digests(self) -> list[bytes]:
        """All digests of the index, in the order in which they entered."""
        return list(self._index)

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix of a chain of digests, with a reference taken on each."""
        blocks = []
        for digest in hashes:
            block = self._index.get(digest)
            if block is None:
                break
            blocks.append(block)
        self.ref(blocks)
        return blocks

    def commit(self, block: int, digest: bytes) -> int:
        """Enters a held block, whose content is complete, into the index under its digest.

        Returns the block that the index has for that digest: another one when the same content was
        computed twice, in which case ``block`` stays out of the index.
        """
        if self.allocatable(block):
            raise BlockAccountingError(f"block {block} was committed by someone who does not hold it")
        if self._digests[block] not in (None, digest):
            raise BlockAccountingError(f"block {block} was committed twice, with different content")
        indexed = self._index.setdefault(digest, block)
        if indexed == block and self._digests[block] is None:
            self._digests[block] = digest
            self.journal.stored(digest)
        return indexed

    def commit_pages(self, pages: tuple[int, ...], digest: bytes) -> None:
        """Enters held pages, whose content is complete, into the index under one digest, unless the index has
        that already: then they stay out of it."""
        if len(pages) == 1:
            self.commit(pages[0], digest)
            return
        if any(self.allocatable(page) for page in pages):
            raise BlockAccountingError(f"pages {pages} were committed by someone who does not hold them")
        if digest in self._index:
            return
        if any(self._digests[page] is not None for page in pages):
            raise BlockAccountingError(f"pages {pages} were committed twice, with different content")
        self._index[digest] = pages[0]
        self._rest[pages[0]] = pages
        for page in pages:
            self._digests[page] = digest
        self.journal.stored(digest)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is None:
            return
        first = self._index.pop(digest)
        pages = self._rest.pop(first, (first,))
        for page in pages:
            self._digests[page] = None
            if page != block and self.allocatable(page):
                self._unlink(page)
                self._num_cached -= 1
                self._link(page)
        self.journal.removed(digest)
        if self._on_evict is not None:
            self._on_evict(pages, digest)

    # -- the list of allocatable blocks ------------------------------------------------------------------

    def _is_free(self, block: int) -> bool:
        return block < self.num_blocks and self.allocatable(block) and self._digests[block] is None

    def _take(self, block: int) -> None:
        """Unlinks an allocatable block and gives it its first reference."""
        if not self.allocatable(block):
            raise BlockAccountingError(
                f"block {block} was taken with {self._refs[block]} references and {self._pins[block]} pins"
            )
        self._unlink(block)
        if self._digests[block] is None:
            self._num_free -= 1
        else:
            self._num_cached -= 1
        self._refs[block] = 1

    def _give_back(self, block: int) -> None:
        """Links a block into the list if nothing holds it any more."""
        if self.allocatable(block):
            self._link(block)

    def _unlink(self, block: int) -> None:
        before, behind = self._prev[block], self._next[block]
        self._next[before], self._prev[behind] = behind, before

    def _link(self, block: int) -> None:
        ends = self.num_blocks
        if self._digests[block] is None:
            before, behind = ends, self._next[ends]
            self._num_free += 1
        else:
            before, behind = self._prev[ends], ends
            self._num_cached += 1
        self._prev[block], self._next[block] = before, behind
        self._next[before] = self._prev[behind] = block
